// ExecuTorch without Python and without libtorch: links the shared runtime that its wheel ships.
// Inputs are zeros of the shapes the method declares (token ids 0 are valid), so only speed and memory are measured.
//   et_run model.pte seconds [threads]      prints one JSON line
// Build: see build_et.sh
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>
#include <time.h>

#include <sys/stat.h>

// The wheel ships this function but not its header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

using namespace executorch::extension;
using clk = std::chrono::steady_clock;
static double since(clk::time_point t) { return std::chrono::duration<double>(clk::now() - t).count(); }
static double cpu() { timespec t; clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static long status_kb(const char* key) {
  std::ifstream f("/proc/self/status");
  std::string l;
  while (std::getline(f, l))
    if (l.compare(0, strlen(key), key) == 0) return atol(l.c_str() + strlen(key) + 1);
  return 0;
}

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  double seconds = atof(argv[2]);
  if (argc > 3) threadpool::get_threadpool()->_unsafe_reset_threadpool((uint32_t)atoi(argv[3]));
  long base = status_kb("VmRSS");
  auto t0 = clk::now();
  Module module(argv[1], Module::LoadMode::Mmap);
  if (module.load_forward() != executorch::runtime::Error::Ok) { fprintf(stderr, "load failed\n"); return 1; }
  double load = since(t0);
  auto meta = module.method_meta("forward");
  std::vector<TensorPtr> keep;
  std::vector<executorch::runtime::EValue> in;
  for (size_t i = 0; i < meta->num_inputs(); i++) {
    auto ti = meta->input_tensor_meta(i);
    std::vector<executorch::aten::SizesType> sizes(ti->sizes().begin(), ti->sizes().end());
    std::vector<uint8_t> data(ti->nbytes(), 0);
    keep.push_back(make_tensor_ptr(sizes, data, ti->scalar_type()));
    in.push_back(*keep.back());
  }
  t0 = clk::now();
  if (!module.forward(in).ok()) { fprintf(stderr, "run failed\n"); return 1; }
  double first = since(t0);
  long peak = status_kb("VmHWM");
  std::vector<double> lat, c;
  auto s = clk::now();
  do {
    double c0 = cpu();
    auto p = clk::now();
    (void)module.forward(in);
    lat.push_back(since(p));
    c.push_back(cpu() - c0);
  } while (since(s) < seconds || lat.size() < 5);
  std::sort(lat.begin(), lat.end());
  std::sort(c.begin(), c.end());
  printf("{\"load_ms\": %.3f, \"first_ms\": %.3f, \"median_ms\": %.4f, \"cpu_median_ms\": %.4f, \"rss_base_mb\": %.1f, "
         "\"rss_peak_mb\": %.1f}\n", load * 1e3, first * 1e3, lat[lat.size() / 2] * 1e3, c[c.size() / 2] * 1e3,
         base / 1024.0, peak / 1024.0);
  return 0;
}
