/* faults.h - everything the runtime can complain about: name, status, text. One list makes the
 * constants and one block of text, so that a fault costs a call site one small number. */
#ifndef TRV_FAULTS_H
#define TRV_FAULTS_H

/* The status is a digit, so that it can be the first character of the text: -(digit) is the
 * trv_status of base.h. */
#ifdef TRV_ONE_MEMORY
#define TRVI_DEVICE_FAULTS(X)
#else
#define TRVI_DEVICE_FAULTS(X)                                        \
  X(REACH, "5", "a value lies in another device's memory")           \
  X(REGION_DEV, "1", "a region's buffer is not the device's memory") \
  X(IMPORT, "6", "the device cannot import host memory")
#endif
#define TRVI_FAULTS(X)                                               \
  X(NULL_ARGUMENT, "1", "an argument is NULL")                       \
  X(BYTE_ORDER, "5", "this machine is not little-endian")            \
  X(BYTES, "1", "the bytes must be there and aligned to 16")         \
  X(NO_READER, "1", "there is no reader")                            \
  X(READER, "6", "the reader failed")                                \
  X(FOREIGN, "2", "this is not a trivet program")                    \
  X(MAJOR, "3", "the file has another major version")                \
  X(HEAD, "2", "the file's head is damaged")                         \
  X(HEAD_CRC, "2", "the file's head is damaged: CRC")                \
  X(HEAD_ROOM, "4", "the head's buffer is too small")                \
  X(TRUNCATED, "2", "the file is truncated")                         \
  X(NEWER, "3", "the file needs a newer runtime")                    \
  X(FEATURES, "3", "the file uses unknown features")                 \
  X(SEGMENT, "2", "a segment is malformed")                          \
  X(SEGMENT_CRC, "2", "a segment is damaged: CRC")                   \
  X(UNMAPPED, "5", "a part's data must be mapped, not read")         \
  X(DETACHED, "7", "the external weights are not attached")          \
  X(NO_EXTERNAL, "7", "the program has no external weights")         \
  X(OTHER_WEIGHTS, "2", "these are not the program's weights")       \
  X(ENTRY, "2", "an entry is malformed")                             \
  X(ROW, "2", "a dimension row is malformed")                        \
  X(REGION, "2", "a region is malformed")                            \
  X(STORAGE, "2", "a storage is malformed")                          \
  X(VALUE, "2", "a value is malformed")                              \
  X(SLOT, "2", "an input or output is malformed")                    \
  X(STEP, "2", "a step is malformed")                                \
  X(PART, "2", "a part is malformed")                                \
  X(OVERLAP, "2", "live storages overlap")                           \
  X(CROWD, "2", "too many live storages")                            \
  X(TOGETHER, "1", "the inputs' sizes do not fit together")          \
  X(INPUT_SIZE, "1", "an input's size is out of range")              \
  X(DATA_SIZE, "1", "a data-dependent size is out of range")         \
  X(OTHERS, "1", "an input's size does not fit the others")          \
  X(OUTSIDE, "2", "a value reaches outside its storage")             \
  X(HUGE_VALUE, "2", "a value is too large")                         \
  X(DENSE, "2", "an input or output is not dense")                   \
  X(INPUT_ROOM, "1", "an input's buffer is too small")               \
  X(OUTPUT_ROOM, "4", "an output's buffer is too small")             \
  X(NEED_REPLAN, "1", "these sizes need TRV_SESSION_REPLAN")         \
  X(TOO_MUCH, "1", "these sizes need too much memory")               \
  X(DESC, "1", "the session's description is incomplete")            \
  X(NO_ENTRY, "1", "there is no such entry")                         \
  X(HAL, "3", "a driver has another HAL version")                    \
  X(MANY, "5", "too many storages to plan again")                    \
  X(NO_DEVICE, "5", "there is no device for this delegate")          \
  X(REFUSED, "5", "the device refuses the part")                     \
  X(PART_OPEN, "6", "the device could not open the part")            \
  X(REGION_ROOM, "4", "a region's buffer is too small")              \
  X(REGION_ALIGN, "1", "a region's buffer is not aligned")           \
  X(REGION_HOST, "5", "a region's buffer is not host memory")        \
  X(SESSION_ALIGN, "1", "the session's memory is not aligned to 16") \
  X(SESSION_ROOM, "4", "the session's memory is too small")          \
  X(NO_SLOT, "1", "there is no such input or output")                \
  X(DTYPE, "1", "the input has another dtype")                       \
  X(RANK, "1", "the input has another rank")                         \
  X(SIZES, "1", "the input's sizes must be given")                   \
  X(BUFFER_ROOM, "4", "the buffer is too small")                     \
  X(BUFFER_ALIGN, "1", "the buffer is not aligned")                  \
  X(NO_REGION, "1", "there is no such region to bind")               \
  X(UNBOUND, "7", "an input of dynamic size is not bound")           \
  X(DEVICE, "6", "the device failed")                                \
  X(COPY, "5", "a copy needs two values of one shape and layout")    \
  X(PREDICATE, "5", "a predicate is not one host element")           \
  X(STEPS, "7", "the run took more than max_steps")                  \
  TRVI_DEVICE_FAULTS(X)

#define TRVI_NAME(name, status, text) TRVI_##name,
enum { TRVI_NO_FAULT, TRVI_FAULTS(TRVI_NAME) TRVI_FAULT_COUNT };
#undef TRVI_NAME
#endif
