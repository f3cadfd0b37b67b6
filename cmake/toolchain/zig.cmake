# Cross-compiles with zig, which brings the C library of every target (pip install ziglang, or zig on PATH):
#   cmake -S . -B build -DCMAKE_TOOLCHAIN_FILE=cmake/toolchain/zig.cmake -DTRIVET_TRIPLE=aarch64-linux-musl
# TRIVET_ZIG: the zig executable. TRIVET_FLAGS: further flags, e.g. -mcpu=baseline_rv64+v.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TRIVET_TRIPLE TRIVET_ZIG TRIVET_FLAGS)
if(NOT TRIVET_TRIPLE)
  message(FATAL_ERROR "-DTRIVET_TRIPLE=... is missing, e.g. aarch64-linux-musl")
endif()
if(NOT TRIVET_ZIG)
  find_program(TRIVET_ZIG zig)
endif()
if(NOT TRIVET_ZIG)
  execute_process(COMMAND python3 -c "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'), end='')"
                  OUTPUT_VARIABLE TRIVET_ZIG ERROR_QUIET)
endif()
if(NOT TRIVET_ZIG)
  message(FATAL_ERROR "zig is not here: pip install ziglang, or give -DTRIVET_ZIG=/path/to/zig")
endif()
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${TRIVET_TRIPLE}")
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_C_COMPILER ${TRIVET_ZIG} cc)
set(CMAKE_C_FLAGS_INIT "-target ${TRIVET_TRIPLE} ${TRIVET_FLAGS}")
# a list ("zig ar") is not allowed for CMAKE_AR
set(CMAKE_C_ARCHIVE_CREATE "\"${TRIVET_ZIG}\" ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
set(CMAKE_C_ARCHIVE_APPEND "\"${TRIVET_ZIG}\" ar q <TARGET> <LINK_FLAGS> <OBJECTS>")
set(CMAKE_C_ARCHIVE_FINISH "\"${TRIVET_ZIG}\" ranlib <TARGET>")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
