# Cross-compiles with a GNU toolchain on PATH, as Debian's gcc-<triple> packages install them:
#   cmake -S . -B build -DCMAKE_TOOLCHAIN_FILE=cmake/toolchain/gnu.cmake -DTRIVET_TRIPLE=aarch64-linux-gnu
# TRIVET_FLAGS: further compiler flags, e.g. -mfpu=neon-vfpv4. For Windows: x86_64-w64-mingw32 (gcc-mingw-w64-x86-64-win32).
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TRIVET_TRIPLE TRIVET_FLAGS)
if(NOT TRIVET_TRIPLE)
  message(FATAL_ERROR "-DTRIVET_TRIPLE=... is missing, e.g. aarch64-linux-gnu")
endif()
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${TRIVET_TRIPLE}")
if(TRIVET_TRIPLE MATCHES "mingw")
  set(CMAKE_SYSTEM_NAME Windows)
  # GCC moves 32 bytes as if Windows aligned the stack to that (its bug 54412); the assembler makes the moves unaligned
  string(APPEND CMAKE_C_FLAGS_INIT " -Wa,-muse-unaligned-vector-move")
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
set(CMAKE_C_COMPILER ${TRIVET_TRIPLE}-gcc)
string(APPEND CMAKE_C_FLAGS_INIT " ${TRIVET_FLAGS}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
