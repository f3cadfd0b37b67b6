// A CUDA driver (libcuda.so.1) that runs shim modules on the CPU: enough of its interface for hal/cuda, with the checks that the real one
// makes. Everything is done when it is asked for. Counts what lives; may fail at a chosen call.
//   TRIVET_FAKE_CUDA   words: arch=87 integrated pageable none nographs=... as the machine that it pretends to be
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int
typedef uint64_t address;

namespace {
enum { OK = 0, INVALID = 1, MEMORY = 2, NO_DEVICE = 100, BAD_IMAGE = 200, NO_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, NOT_REGISTERED = 713 };
struct shim_kernel { // as trv_shim::kernel
  void (*run)(const long long*);
  int words, threads;
};
typedef int (*launch_fn)(const shim_kernel*, const char*, const unsigned*, unsigned, const long long*);
struct object {
  const char* kind;
};
struct function {
  const shim_kernel* kernel;
  launch_fn launch;
  std::string name;
};
struct module : object {
  void* library;
  std::map<std::string, function> functions;
};
struct event : object {
  bool recorded;
  std::chrono::steady_clock::time_point at;
};
struct node {
  function* f;
  unsigned grid[3], threads;
  std::vector<long long> words;
  bool enabled;
};
struct graph : object {
  std::vector<node*> nodes;
};
struct exec : object {
  std::vector<node*> keys;
  std::vector<node> nodes;
};
struct params {
  function* f;
  unsigned grid[3], block[3], shared;
  void** arguments;
  void** extra;
};

std::mutex lock;
std::set<void*> objects;
std::map<address, size_t> device_memory;
std::map<void*, size_t> pinned, registered;
std::atomic<long> calls{0}, fail_at{-1}, launches{0}, graph_launches{0}, bytes_copied{0}, set_params{0};
thread_local int depth = 0;

const char* setting(const char* name) {
  const char* all = getenv("TRIVET_FAKE_CUDA");
  const char* found = all ? strstr(all, name) : nullptr;
  return found;
}
int number(const char* name, int otherwise) {
  const char* s = setting(name);
  return s ? atoi(s + strlen(name)) : otherwise;
}
bool failing() { return ++calls == fail_at; }
#define CALL(needs_context)                   \
  if (failing()) return MEMORY;               \
  if ((needs_context) && depth == 0) return NO_CONTEXT;
template <class T>
T* made(T* t) {
  std::lock_guard<std::mutex> g(lock);
  objects.insert(t);
  return t;
}
template <class T>
bool known(T* t) {
  std::lock_guard<std::mutex> g(lock);
  return objects.count(t) != 0;
}
template <class T>
int destroy(T* t) {
  {
    std::lock_guard<std::mutex> g(lock);
    if (!objects.erase(t)) return INVALID;
  }
  delete t;
  return OK;
}
int run(function* f, const unsigned* grid, unsigned threads, const long long* words) {
  if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 || threads == 0 || threads > 1024) return INVALID;
  launches++;
  return f->launch(f->kernel, f->name.c_str(), grid, threads, words) ? INVALID : OK;
}
node make(const params* p) {
  node n;
  n.f = p->f;
  memcpy(n.grid, p->grid, sizeof n.grid);
  n.threads = p->block[0];
  const long long* words = (const long long*)p->arguments[0];
  n.words.assign(words, words + p->f->kernel->words);
  n.enabled = true;
  return n;
}
bool inside(const std::map<address, size_t>& m, address at, size_t size) {
  auto i = m.upper_bound(at);
  if (i == m.begin()) return false;
  --i;
  return at - i->first <= i->second && size <= i->second - (at - i->first);
}
bool on_device(address at, size_t size) {
  std::lock_guard<std::mutex> g(lock);
  if (inside(device_memory, at, size)) return true;
  for (auto* m : {&pinned, &registered})
    for (auto& r : *m)
      if (at >= (address)r.first && at - (address)r.first + size <= r.second) return true;
  return false;
}
} // namespace

API trv_fake_live() { return (int)(objects.size() + device_memory.size() + pinned.size() + registered.size()); }
extern "C" __attribute__((visibility("default"))) void trv_fake_fail_at(long n) {
  calls = 0;
  fail_at = n;
}
extern "C" __attribute__((visibility("default"))) long trv_fake_count(const char* what) {
  const std::string w = what;
  return w == "calls" ? calls.load() : w == "launches" ? launches.load() : w == "graphs" ? graph_launches.load() : w == "bytes" ? bytes_copied.load() : w == "params" ? set_params.load() : -1;
}

API cuInit(unsigned) {
  CALL(false)
  return setting("none") ? NO_DEVICE : OK;
}
API cuDeviceGet(int* out, int ordinal) {
  CALL(false)
  *out = ordinal;
  return ordinal == 0 ? OK : 101;
}
API cuDeviceGetAttribute(int* out, int which, int) {
  CALL(false)
  const int arch = number("arch=", 87);
  *out = which == 75 ? arch / 10 : which == 76 ? arch % 10 : which == 18 ? setting("integrated") != nullptr : which == 88 ? setting("pageable") != nullptr : 0;
  return OK;
}
API cuDevicePrimaryCtxRetain(void** out, int) {
  CALL(false)
  static int context;
  *out = &context;
  return OK;
}
API cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API cuCtxPushCurrent_v2(void*) {
  CALL(false)
  depth++;
  return OK;
}
API cuCtxPopCurrent_v2(void**) {
  if (depth == 0) return NO_CONTEXT;
  depth--;
  return OK;
}
API cuStreamCreate(void** out, unsigned) {
  CALL(true)
  *out = made(new object{"stream"});
  return OK;
}
API cuStreamDestroy_v2(object* s) { return destroy(s); }
API cuStreamSynchronize(void*) {
  CALL(true)
  return OK;
}
API cuStreamWaitEvent(void*, event* e, unsigned) {
  CALL(true)
  return known(e) ? OK : INVALID;
}
API cuEventCreate(void** out, unsigned) {
  CALL(true)
  event* e = new event();
  e->kind = "event";
  *out = made(e);
  return OK;
}
API cuEventDestroy_v2(event* e) { return destroy(e); }
API cuEventRecord(event* e, void*) {
  CALL(true)
  if (!known(e)) return INVALID;
  e->recorded = true;
  e->at = std::chrono::steady_clock::now();
  return OK;
}
API cuEventQuery(event* e) {
  CALL(true)
  return known(e) ? OK : INVALID;
}
API cuEventSynchronize(event* e) {
  CALL(true)
  return known(e) ? OK : INVALID;
}
API cuEventElapsedTime(float* ms, event* a, event* b) {
  CALL(true)
  if (!known(a) || !known(b) || !a->recorded || !b->recorded) return INVALID;
  *ms = std::chrono::duration<float, std::milli>(b->at - a->at).count();
  return OK;
}
API cuMemGetInfo_v2(size_t* left, size_t* total) {
  CALL(true)
  *left = *total = (size_t)8 << 30;
  return OK;
}
API cuMemAlloc_v2(address* out, size_t size) {
  CALL(true)
  void* p = size && size < (size_t)1 << 36 ? aligned_alloc(256, (size + 255) / 256 * 256) : nullptr;
  if (!p) return MEMORY;
  memset(p, 0xCD, size);
  std::lock_guard<std::mutex> g(lock);
  device_memory[(address)p] = size;
  *out = (address)p;
  return OK;
}
API cuMemFree_v2(address p) {
  {
    std::lock_guard<std::mutex> g(lock);
    if (!device_memory.erase(p)) return INVALID;
  }
  free((void*)p);
  return OK;
}
API cuMemHostAlloc(void** out, size_t size, unsigned) {
  CALL(true)
  void* p = size < (size_t)1 << 36 ? aligned_alloc(4096, (size + 4095) / 4096 * 4096) : nullptr;
  if (!p) return MEMORY;
  std::lock_guard<std::mutex> g(lock);
  pinned[p] = size;
  *out = p;
  return OK;
}
API cuMemFreeHost(void* p) {
  {
    std::lock_guard<std::mutex> g(lock);
    if (!pinned.erase(p)) return INVALID;
  }
  free(p);
  return OK;
}
API cuMemHostGetDevicePointer_v2(address* out, void* p, unsigned) {
  CALL(true)
  *out = (address)p;
  return on_device((address)p, 1) ? OK : INVALID;
}
API cuMemHostRegister_v2(void* p, size_t size, unsigned) {
  CALL(true)
  std::lock_guard<std::mutex> g(lock);
  if (registered.count(p)) return 712;
  registered[p] = size;
  return OK;
}
API cuMemHostUnregister(void* p) {
  std::lock_guard<std::mutex> g(lock);
  return registered.erase(p) ? OK : NOT_REGISTERED;
}
API cuMemcpyHtoDAsync_v2(address to, const void* from, size_t size, void*) {
  CALL(true)
  if (!on_device(to, size)) return INVALID;
  memcpy((void*)to, from, size);
  bytes_copied += (long)size;
  return OK;
}
API cuMemcpyDtoHAsync_v2(void* to, address from, size_t size, void*) {
  CALL(true)
  if (!on_device(from, size)) return INVALID;
  memcpy(to, (const void*)from, size);
  bytes_copied += (long)size;
  return OK;
}
API cuMemcpyDtoDAsync_v2(address to, address from, size_t size, void*) {
  CALL(true)
  if (!on_device(to, size) || !on_device(from, size)) return INVALID;
  memmove((void*)to, (const void*)from, size);
  bytes_copied += (long)size;
  return OK;
}
API cuModuleLoadData(void** out, const unsigned char* image) {
  CALL(true)
  if (memcmp(image, "\177ELF", 4)) return BAD_IMAGE;
  uint64_t shoff;
  uint16_t shsize, shnum, machine;
  memcpy(&shoff, image + 40, 8);
  memcpy(&shsize, image + 58, 2);
  memcpy(&shnum, image + 60, 2);
  memcpy(&machine, image + 18, 2);
  if (machine != 62 && machine != 183) return 209; // no code for this device: a real cubin
  char path[] = "/tmp/trivet-part-XXXXXX"; // dlopen tells libraries apart by their names
  const int fd = mkstemp(path);
  const size_t size = shoff + (size_t)shsize * shnum;
  if (fd < 0 || write(fd, image, size) != (ssize_t)size) return MEMORY;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  close(fd);
  unlink(path);
  if (!library) return BAD_IMAGE;
  module* m = new module();
  m->kind = "module";
  m->library = library;
  *out = made(m);
  return OK;
}
API cuModuleUnload(module* m) {
  if (!known(m)) return INVALID;
  dlclose(m->library);
  return destroy(m);
}
API cuModuleGetFunction(function** out, module* m, const char* name) {
  CALL(true)
  if (!known(m)) return INVALID;
  void* k = dlsym(m->library, name);
  void* l = dlsym(m->library, "trv_shim_launch");
  if (!k || !l) return NOT_FOUND;
  function& f = m->functions[name];
  f.kernel = (const shim_kernel*)k;
  f.launch = (launch_fn)l;
  f.name = name;
  *out = &f;
  return OK;
}
API cuLaunchKernel(function* f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned, void*, void** arguments, void**) {
  CALL(true)
  if (by != 1 || bz != 1) return INVALID;
  const unsigned grid[3] = {x, y, z};
  return run(f, grid, bx, (const long long*)arguments[0]);
}
API cuGraphCreate(void** out, unsigned) {
  CALL(true)
  graph* g = new graph();
  g->kind = "graph";
  *out = made(g);
  return OK;
}
API cuGraphDestroy(graph* g) {
  if (!known(g)) return INVALID;
  for (node* n : g->nodes) delete n;
  return destroy(g);
}
API cuGraphAddKernelNode(void** out, graph* g, void* const* before, size_t count, const params* p) {
  CALL(true)
  if (!known(g) || (count && *before != g->nodes.back())) return INVALID;
  node* n = new node(make(p));
  g->nodes.push_back(n);
  *out = n;
  return OK;
}
API cuGraphInstantiateWithFlags(void** out, graph* g, unsigned long long) {
  CALL(true)
  if (!known(g)) return INVALID;
  exec* e = new exec();
  e->kind = "exec";
  e->keys = g->nodes;
  for (node* n : g->nodes) e->nodes.push_back(*n);
  *out = made(e);
  return OK;
}
API cuGraphExecDestroy(exec* e) { return destroy(e); }
API cuGraphExecKernelNodeSetParams(exec* e, node* n, const params* p) {
  CALL(true)
  if (!known(e)) return INVALID;
  set_params++;
  for (size_t i = 0; i < e->keys.size(); i++)
    if (e->keys[i] == n) {
      if (p->f != e->nodes[i].f) return INVALID;
      const bool enabled = e->nodes[i].enabled;
      e->nodes[i] = make(p);
      e->nodes[i].enabled = enabled;
      return OK;
    }
  return INVALID;
}
API cuGraphNodeSetEnabled(exec* e, node* n, unsigned enabled) {
  CALL(true)
  for (size_t i = 0; i < e->keys.size(); i++)
    if (e->keys[i] == n) e->nodes[i].enabled = enabled != 0;
  return OK;
}
API cuGraphUpload(exec* e, void*) {
  CALL(true)
  return known(e) ? OK : INVALID;
}
API cuGraphLaunch(exec* e, void*) {
  CALL(true)
  if (!known(e)) return INVALID;
  graph_launches++;
  for (node& n : e->nodes)
    if (n.enabled) {
      const int r = run(n.f, n.grid, n.threads, n.words.data());
      if (r) return r;
    }
  return OK;
}
API cuGetErrorString(int code, const char** out) {
  *out = code == MEMORY ? "out of memory" : code == INVALID ? "invalid argument" : code == NO_CONTEXT ? "invalid device context" : "error";
  return OK;
}
