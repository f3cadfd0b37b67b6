/* host_windows.c - the system under host*.c: Windows 8 and later. */
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#undef _WIN32_WINNT
#define _WIN32_WINNT 0x0602 /* WaitOnAddress, PrefetchVirtualMemory */
#include <windows.h>
/* after it */
#include <malloc.h>
#include <process.h>
#include <stdlib.h>

#include "host_os.h"

#define BASE_ALIGN 64u

/* ---- memory and files ---- */
void* trvi_new(size_t size, size_t align) {
  if (align < BASE_ALIGN) align = BASE_ALIGN;
  if (size > SIZE_MAX - align) return NULL;
  return _aligned_malloc(size + !size, align);
}

void trvi_delete(void* memory) { _aligned_free(memory); }

/* UTF-8, and what is none in the code page of the process, as its command line is. */
static wchar_t* wide(const char* path) {
  UINT page = CP_UTF8;
  int n = MultiByteToWideChar(page, MB_ERR_INVALID_CHARS, path, -1, NULL, 0);
  if (n <= 0) {
    page = CP_ACP;
    n = MultiByteToWideChar(page, 0, path, -1, NULL, 0);
  }
  wchar_t* out = n > 0 ? calloc((size_t)n, sizeof(*out)) : NULL;
  if (out) (void)MultiByteToWideChar(page, 0, path, -1, out, n);
  return out;
}

trv_status trvi_map(const char* path, trv_span* out_file, const char** out_what) {
  LARGE_INTEGER size = {0};
  wchar_t* name = wide(path);
  if (!name) {
    *out_what = "the file's name cannot be read";
    return TRV_DEVICE;
  }
  const HANDLE file = CreateFileW(name, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL,
                                  OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
  free(name);
  if (file == INVALID_HANDLE_VALUE) {
    *out_what = "the file cannot be opened";
    return TRV_DEVICE;
  }
  if (GetFileType(file) != FILE_TYPE_DISK || !GetFileSizeEx(file, &size) || size.QuadPart < 0 ||
      (uint64_t)size.QuadPart > SIZE_MAX) {
    CloseHandle(file);
    *out_what = "this is not a file that can be mapped";
    return TRV_DEVICE;
  }
  if (size.QuadPart == 0) {
    CloseHandle(file);
    *out_what = "the file is empty";
    return TRV_FORMAT;
  }
  const HANDLE mapping = CreateFileMappingW(file, NULL, PAGE_READONLY, 0, 0, NULL);
  const void* p = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0) : NULL;
  if (mapping) CloseHandle(mapping); /* the view keeps it */
  CloseHandle(file);
  if (!p) {
    *out_what = "the file cannot be mapped";
    return TRV_DEVICE;
  }
  out_file->data = p;
  out_file->size = (size_t)size.QuadPart;
  return TRV_OK;
}

void trvi_unmap(trv_span file) { UnmapViewOfFile(file.data); }

void trvi_map_pages(const void* data, size_t size) {
  WIN32_MEMORY_RANGE_ENTRY range = {(void*)(uintptr_t)data, size};
  (void)PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
}

trv_status trvi_library_open(const char* path, void** out_library) {
  wchar_t* name = wide(path);
  *out_library = name ? (void*)LoadLibraryW(name) : NULL;
  free(name);
  return *out_library ? TRV_OK : TRV_DEVICE;
}

void trvi_library_close(void* library) {
  if (library) (void)FreeLibrary((HMODULE)library);
}

void (*trvi_library_find(void* library, const char* name))(void) {
  return (void (*)(void))GetProcAddress((HMODULE)library, name);
}

uint64_t trvi_now_ns(void) {
  LARGE_INTEGER ticks, rate;
  QueryPerformanceFrequency(&rate);
  QueryPerformanceCounter(&ticks);
  const uint64_t t = (uint64_t)ticks.QuadPart, hz = (uint64_t)rate.QuadPart;
  return t / hz * 1000000000u + t % hz * 1000000000u / hz;
}

/* ---- locks and sleep ---- */
typedef BOOL(WINAPI* wait_fn)(volatile VOID* address, PVOID compare, SIZE_T size, DWORD ms);
typedef void(WINAPI* wake_fn)(PVOID address);

/* Waiting on an address is looked up, so that nobody has to link its import library, which every
 * toolchain names differently. */
struct trvi_lock {
  SRWLOCK lock;
  wait_fn wait;
  wake_fn wake_one, wake_all;
};

trvi_lock* trvi_lock_open(void) {
  typedef void (*any_fn)(void); /* between types of functions compilers want one in the middle */
  const HMODULE synch = GetModuleHandleW(L"kernelbase.dll");
  trvi_lock* l = synch ? calloc(1, sizeof(*l)) : NULL;
  if (!l) return NULL;
  InitializeSRWLock(&l->lock);
  l->wait = (wait_fn)(any_fn)GetProcAddress(synch, "WaitOnAddress");
  l->wake_one = (wake_fn)(any_fn)GetProcAddress(synch, "WakeByAddressSingle");
  l->wake_all = (wake_fn)(any_fn)GetProcAddress(synch, "WakeByAddressAll");
  if (l->wait && l->wake_one && l->wake_all) return l;
  free(l);
  return NULL;
}

void trvi_lock_close(trvi_lock* lock) { free(lock); }

void trvi_lock_take(trvi_lock* lock) { AcquireSRWLockExclusive(&lock->lock); }

void trvi_lock_give(trvi_lock* lock) { ReleaseSRWLockExclusive(&lock->lock); }

void trvi_sleep_while(trvi_lock* lock, _Atomic uint32_t* word, uint32_t value) {
  lock->wait((volatile void*)word, &value, sizeof(value), INFINITE);
}

void trvi_wake(trvi_lock* lock, _Atomic uint32_t* word, uint32_t count) {
  if (count == 1)
    lock->wake_one((void*)word);
  else
    lock->wake_all((void*)word);
}

/* ---- threads ---- */
static unsigned __stdcall begin(void* self) {
  const trvi_thread* t = self;
  t->fn(t->self);
  return 0;
}

/* Processors are those of the process's own group, 64 at most. */
trv_status trvi_thread_start(trvi_thread* thread, const uint32_t* cpus, uint32_t count) {
  DWORD_PTR mask = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (cpus[i] >= 8 * sizeof(mask)) return TRV_ARGUMENT;
    mask |= (DWORD_PTR)1 << cpus[i];
  }
  thread->handle = _beginthreadex(NULL, 0, begin, thread, CREATE_SUSPENDED, NULL);
  if (!thread->handle) return TRV_DEVICE;
  const HANDLE handle = (HANDLE)thread->handle;
  if (mask && !SetThreadAffinityMask(handle, mask)) {
    TerminateThread(handle, 0); /* it has not begun */
    CloseHandle(handle);
    return TRV_ARGUMENT;
  }
  ResumeThread(handle);
  return TRV_OK;
}

void trvi_thread_join(trvi_thread* thread) {
  WaitForSingleObject((HANDLE)thread->handle, INFINITE);
  CloseHandle((HANDLE)thread->handle);
}

uint32_t trvi_processors(void) {
  DWORD_PTR mine = 0, all = 0;
  uint32_t n = 0;
  if (GetProcessAffinityMask(GetCurrentProcess(), &mine, &all))
    for (; mine; mine &= mine - 1) n++;
  if (n == 0) n = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS); /* it runs in several groups */
  return n ? n : 1;
}
#else
typedef int trvi_not_windows; /* a file without a declaration is not C */
#endif
