/* system.c - a clock, memory used and folders: POSIX, Windows, WASI. */
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
/* after it */
#include <direct.h>
#define PSAPI_VERSION 2 /* of kernel32 */
#include <psapi.h>
#else
#define _POSIX_C_SOURCE 200809L
#define _DARWIN_C_SOURCE /* ru_maxrss */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#if defined(__APPLE__)
#include <sys/resource.h>
#endif
#endif

#include "system.h"

#if defined(_WIN32)
double now_ms(void) {
  LARGE_INTEGER ticks, rate;
  QueryPerformanceFrequency(&rate);
  QueryPerformanceCounter(&ticks);
  return (double)ticks.QuadPart * 1e3 / (double)rate.QuadPart;
}

long long peak_bytes(void) {
  PROCESS_MEMORY_COUNTERS used;
  return GetProcessMemoryInfo(GetCurrentProcess(), &used, sizeof(used))
             ? (long long)used.PeakWorkingSetSize
             : -1;
}

void make_folder(const char* path) { (void)_mkdir(path); }
#else
double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Linux's getrusage would count what a parent held that started this process by vfork. */
long long peak_bytes(void) {
  long long peak = -1;
#if defined(__wasi__)
  peak = (long long)__builtin_wasm_memory_size(0) * 65536; /* it never shrinks */
#elif defined(__linux__)
  char line[128];
  FILE* f = fopen("/proc/self/status", "r");
  while (f && fgets(line, sizeof line, f))
    if (strncmp(line, "VmHWM:", 6) == 0) peak = strtoll(line + 6, NULL, 10) * 1024;
  if (f) fclose(f);
#elif defined(__APPLE__)
  struct rusage used;
  if (!getrusage(RUSAGE_SELF, &used)) peak = used.ru_maxrss;
#endif
  return peak;
}

void make_folder(const char* path) { (void)mkdir(path, 0777); }
#endif
