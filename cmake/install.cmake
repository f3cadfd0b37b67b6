# What an application finds after `cmake --install`: headers, libraries, trv_run, find_package(trivet), pkg-config.
if(SKBUILD) # the wheel: where trivet/native.py looks, on every distribution
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(TRIVET_CONFIG_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/trivet)

# add_subdirectory and find_package give the same names
add_library(trivet::static ALIAS trivet_static)
set_target_properties(trivet_static PROPERTIES EXPORT_NAME static)
set(TRIVET_LIBRARIES trivet_static)
if(TARGET trivet_shared)
  add_library(trivet::trivet ALIAS trivet_shared)
  set_target_properties(trivet_shared PROPERTIES EXPORT_NAME trivet)
  list(APPEND TRIVET_LIBRARIES trivet_shared)
endif()

install(TARGETS ${TRIVET_LIBRARIES} EXPORT trivet
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET trv_run)
  install(TARGETS trv_run RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(TARGET trivet_npu_sim)
  install(TARGETS trivet_npu_sim trivet_null LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET trivet_wasm)
  install(PROGRAMS $<TARGET_FILE:trivet_wasm> runtime_c/wasm/trivet.mjs DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY hal/include/trivet runtime_c/include/trivet DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(FILES schema/gen/trv_schema.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

install(EXPORT trivet NAMESPACE trivet:: FILE trivetTargets.cmake DESTINATION ${TRIVET_CONFIG_DIR})
configure_package_config_file(cmake/trivetConfig.cmake.in trivetConfig.cmake INSTALL_DESTINATION ${TRIVET_CONFIG_DIR})
write_basic_package_version_file(trivetConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/trivetConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/trivetConfigVersion.cmake
  DESTINATION ${TRIVET_CONFIG_DIR})

set(TRIVET_PC_LIBS "-lm")
if(TRIVET_HOST)
  string(APPEND TRIVET_PC_LIBS " ${CMAKE_THREAD_LIBS_INIT}")
endif()
file(RELATIVE_PATH TRIVET_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/trivet.pc.in trivet.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/trivet.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# `trivet build` and `trivet deploy` compile from here
if(SKBUILD)
  install(DIRECTORY hal runtime_c cmake DESTINATION csrc)
  install(DIRECTORY schema/gen DESTINATION csrc/schema)
  install(FILES CMakeLists.txt DESTINATION csrc)
  # projects of `trivet new-delegate` build the test of drivers
  install(FILES tests/hal/conformance.c tests/hal/faulty.c tests/hal/faulty.h DESTINATION csrc/tests/hal)
endif()
