# find_package(lowbit): libraries of matmuls, made when a project is built.
#
#   cmake -B build -Dlowbit_DIR=$(python -m lowbit --cmake-dir)
#
#   find_package(lowbit REQUIRED)
#   lowbit_add_matmul(qkv WEIGHT u4 GROUP_SIZE 128 N 6144 K 4096 TARGETS sm_90a cpu)
#   target_link_libraries(app PRIVATE qkv)       # #include <lowbit.h> and <qkv.h>
#
# An exported folder has this file, too, and needs neither Python nor an installed lowbit:
#
#   include(folder/cmake/lowbit-config.cmake)
#   lowbit_add_folder(qkv FOLDER folder)

set(LOWBIT_PYTHON "" CACHE FILEPATH "The Python that has lowbit; without it, the one that CMake finds")

# The folder that has the runtime, and its files.
function(_lowbit_find_sources root sources)
  get_filename_component(above "${CMAKE_CURRENT_FUNCTION_LIST_DIR}" DIRECTORY)
  set(files files.c json.c cpu.c quantize.c cuda.c pack.c packing.c fold.c range.c saved.c lowbit.c tvm_ffi.c)
  list(TRANSFORM files PREPEND "${above}/src/")
  set(${root} "${above}" PARENT_SCOPE)
  set(${sources} "${files}" PARENT_SCOPE)
endfunction()

# The runtime: one for all matmuls of a project.
function(_lowbit_add_runtime)
  if(TARGET lowbit_runtime)
    return()
  endif()
  find_package(Threads REQUIRED)
  _lowbit_find_sources(root sources)
  add_library(lowbit_runtime STATIC ${sources})
  add_library(lowbit::runtime ALIAS lowbit_runtime)
  target_include_directories(lowbit_runtime PUBLIC "${root}/include")
  set_target_properties(lowbit_runtime PROPERTIES
    C_STANDARD 11 C_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(lowbit_runtime PUBLIC Threads::Threads ${CMAKE_DL_LIBS} m)
endfunction()

# A library of what a folder has, all files in it, and a header `name.h`. A shared one has the runtime in it, too.
function(_lowbit_add_library name folder shared)
  _lowbit_add_runtime()
  _lowbit_find_sources(root sources)
  set(headers "${CMAKE_CURRENT_BINARY_DIR}/lowbit-${name}-include")
  file(WRITE "${headers}/${name}.h.new"
    "#include <lowbit.h>\n"
    "#ifdef __cplusplus\nextern \"C\"\n#else\nextern\n#endif\n"
    "LOWBIT_API const lowbit_file ${name}_files[]; /* for lowbit_open_files */\n")
  configure_file("${headers}/${name}.h.new" "${headers}/${name}.h" COPYONLY)
  if(shared)
    add_library(${name} SHARED "${folder}/src/embedded.c" ${sources})
    target_include_directories(${name} PUBLIC "${root}/include")
    find_package(Threads REQUIRED)
    target_link_libraries(${name} PUBLIC Threads::Threads ${CMAKE_DL_LIBS} m)
  else()
    add_library(${name} STATIC "${folder}/src/embedded.c")
    target_link_libraries(${name} PUBLIC lowbit_runtime)
  endif()
  set_property(SOURCE "${folder}/src/embedded.c" APPEND PROPERTY OBJECT_DEPENDS "${folder}/manifest.json")
  target_compile_definitions(${name} PRIVATE "LOWBIT_FOLDER=\"${folder}\"" "LOWBIT_FILES=${name}_files")
  target_include_directories(${name} PUBLIC "${headers}" PRIVATE "${root}/src")
  set_target_properties(${name} PROPERTIES
    C_STANDARD 11 C_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
endfunction()

# lowbit_add_folder(name FOLDER folder [SHARED]): a library of an exported folder.
function(lowbit_add_folder name)
  cmake_parse_arguments(PARSE_ARGV 1 given "SHARED" "FOLDER" "")
  get_filename_component(folder "${given_FOLDER}" ABSOLUTE)
  if(NOT EXISTS "${folder}/manifest.json")
    message(FATAL_ERROR "lowbit_add_folder(${name}): ${folder} has no manifest.json; export into it first")
  endif()
  _lowbit_add_library(${name} "${folder}" "${given_SHARED}")
endfunction()

# lowbit_add_matmul(name WEIGHT u4 N 4096 K 4096 TARGETS sm_90a cpu ...): a library of a matmul `name`, compiled when the
# project is built. The other arguments are options of `lowbit export`: GROUP_SIZE 128, ZEROS int, BIAS ...
# With SHARED it is a shared library, which has all code in it and the functions of tvm-ffi (src/tvm_ffi.h).
# lowbit_add_matmul(name FILE matmuls.toml): of all matmuls of a file.
function(lowbit_add_matmul name)
  set(flags BIAS ROW_SCALES PERMUTED OUTLIERS FOLD_SCALES INVARIANT WIDE_RANGE)
  set(values WEIGHT N K GROUP_SIZE ZEROS SCALE ACT OUT TABLE BILEVEL COMPUTE COMPUTE_FROM EPILOGUE EXPERTS)
  cmake_parse_arguments(PARSE_ARGV 1 given "${flags};SHARED" "FILE;${values}" "TARGETS")
  if(given_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "lowbit_add_matmul(${name}): unknown ${given_UNPARSED_ARGUMENTS}; allowed: ${flags};${values};FILE;TARGETS;SHARED")
  endif()
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/lowbit-${name}")
  set(options --folder "${folder}")
  if(given_FILE)
    get_filename_component(file "${given_FILE}" ABSOLUTE)
    list(PREPEND options "${file}")
  else()
    list(APPEND options --name "${name}")
  endif()
  if(given_TARGETS)
    list(JOIN given_TARGETS "," targets)
    list(APPEND options --targets "${targets}")
  endif()
  foreach(option IN LISTS flags values)
    string(TOLOWER "--${option}" word)
    string(REPLACE "_" "-" word "${word}")
    if(option IN_LIST flags AND given_${option})
      list(APPEND options "${word}")
    elseif(option IN_LIST values AND DEFINED given_${option})
      list(APPEND options "${word}=${given_${option}}")
    endif()
  endforeach()
  _lowbit_find_python(python)
  add_custom_command(
    OUTPUT "${folder}/manifest.json" "${folder}/src/embedded.c"
    COMMAND "${python}" -m lowbit export ${options}
    DEPENDS ${file}
    COMMENT "Compiling matmuls of ${name}"
    VERBATIM)
  _lowbit_add_library(${name} "${folder}" "${given_SHARED}")
endfunction()

function(_lowbit_find_python found)
  if(LOWBIT_PYTHON)
    set(${found} "${LOWBIT_PYTHON}" PARENT_SCOPE)
    return()
  endif()
  find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter)
  set(${found} "${Python3_EXECUTABLE}" PARENT_SCOPE)
endfunction()

# lowbit_add_torch_library(name MATMULS u4 [TORCH folder]): a shared library that gives torch (2.10 or later) the operator
# lowbit::matmul, by the matmuls of a target. TORCH is a folder of libtorch; without it, that of Python's torch.
function(lowbit_add_torch_library name)
  cmake_parse_arguments(PARSE_ARGV 1 given "" "MATMULS;TORCH" "")
  set(torch "${given_TORCH}")
  if(NOT torch)
    _lowbit_find_python(python)
    execute_process(
      COMMAND "${python}" -c "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE torch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  endif()
  _lowbit_find_sources(root sources)
  add_library(${name} SHARED "${root}/src/torch_library.cpp")
  target_include_directories(${name} SYSTEM PRIVATE "${torch}/include")
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_compile_definitions(${name} PRIVATE "LOWBIT_FILES=${given_MATMULS}_files")
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden)
  target_link_libraries(${name} PRIVATE ${given_MATMULS} "${torch}/lib/libtorch_cpu.so")
endfunction()
