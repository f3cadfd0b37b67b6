/* trv_run.c - command line tool on the public C API: inspect, run, bench. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inspect.h"
#include "npy.h"
#include "system.h"

static const char usage[] =
    "trv_run - runs trivet programs\n"
    "\n"
    "  trv_run inspect FILE [--json]            entries, inputs, outputs, memory, what each step "
    "does\n"
    "  trv_run run FILE [INPUT ...] [-o DIR]    runs an entry; INPUT: x.npy, or raw bytes: x.raw, "
    "x.raw@1x3x224x224;\n"
    "                                           a missing input gets zeros; outputs go to "
    "DIR/output_0.npy ..., DIR is made\n"
    "  trv_run selftest FILE                    checks the golden pairs that export put into the "
    "file; status 1: an output differs\n"
    "  trv_run bench FILE [INPUT ...]           times it; a missing input gets random numbers, its "
    "size from --size\n"
    "\n"
    "  --entry NAME    the entry to run (default: the first)\n"
    "  --weights FILE  external weights\n"
    "  --devices LIST  who runs it, best first: name:options,name (default: what the file asks "
    "for, "
    "as far\n"
    "                  as it is here, then the CPU)\n"
    "  --plugin FILE   a library with one more driver; may be given several times\n"
    "  --threads N     default: all cores\n"
    "  --size N        bench, run: what dynamic sizes of missing inputs are (default: 1, or the "
    "least allowed)\n"
    "  --runs N, --warmup N   bench: default 50 and 5\n"
    "  --defer-crc     check the weights when they are first used, not when the file is opened\n"
    "  --json          machine-readable\n";

typedef struct options {
  const char *command, *file, *entry, *weights, *out, *devices;
  const char* plugins[8];
  uint32_t plugin_count;
  const char* inputs[64];
  uint32_t input_count, threads, runs, warmup, flags;
  int64_t size;
  int json, help;
} options;

typedef struct job {
  trv_host* host;
  trv_context* ctx;
  trv_entry entry;
  npy_array* arrays;
  double load_ms;
} job;

static int complain(const char* format, ...) {
  va_list args;
  va_start(args, format);
  fputs("trv_run: ", stderr);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  return 1;
}

static int complain_diag(const trv_diag* d, const char* about) {
  char line[512];
  trv_diag_print(d, line, sizeof(line));
  return complain("%s: %s", about, line);
}

/* ---- options
 * -------------------------------------------------------------------------------------------------------
 */
static int number(const char* text, int64_t least, int64_t* out) {
  char* end;
  *out = strtoll(text, &end, 10);
  return *text && !*end && *out >= least;
}

static int parse(int argc, char** argv, options* o) {
  memset(o, 0, sizeof(*o));
  o->runs = 50;
  o->warmup = 5;
  o->size = 1;
  for (int i = 1; i < argc; i++) {
    const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
    int64_t n = 0;
    if (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0) {
      o->help = 1;
    } else if (strcmp(a, "--json") == 0) {
      o->json = 1;
    } else if (strcmp(a, "--defer-crc") == 0) {
      o->flags |= TRV_OPEN_DEFER_CRC;
    } else if (a[0] == '-' && a[1]) {
      if (!v) return complain("%s needs a value", a);
      i++;
      if (strcmp(a, "--entry") == 0)
        o->entry = v;
      else if (strcmp(a, "--weights") == 0)
        o->weights = v;
      else if (strcmp(a, "--devices") == 0)
        o->devices = v;
      else if (strcmp(a, "--plugin") == 0 && o->plugin_count < 8)
        o->plugins[o->plugin_count++] = v;
      else if (strcmp(a, "-o") == 0)
        o->out = v;
      else if (strcmp(a, "--threads") == 0 && number(v, 1, &n))
        o->threads = (uint32_t)n;
      else if (strcmp(a, "--runs") == 0 && number(v, 1, &n))
        o->runs = (uint32_t)n;
      else if (strcmp(a, "--warmup") == 0 && number(v, 0, &n))
        o->warmup = (uint32_t)n;
      else if (strcmp(a, "--size") == 0 && number(v, 0, &n))
        o->size = n;
      else
        return complain("%s %s is not understood", a, v);
    } else if (!o->command) {
      o->command = a;
    } else if (!o->file) {
      o->file = a;
    } else if (o->input_count < sizeof(o->inputs) / sizeof(*o->inputs)) {
      o->inputs[o->input_count++] = a;
    } else {
      return complain("too many inputs");
    }
  }
  return 0;
}

/* ---- inputs
 * --------------------------------------------------------------------------------------------------------
 */
/* "x.raw@1x3x4": sizes after the @. */
static const char* read_shaped(const char* text, npy_array* out) {
  char path[4096];
  const char* at = strrchr(text, '@');
  const size_t length = at ? (size_t)(at - text) : strlen(text);
  if (length >= sizeof(path)) return "has too long a name";
  memcpy(path, text, length);
  path[length] = 0;
  const char* bad = npy_read_raw(path, out);
  while (!bad && at && *at) {
    char* end;
    if (out->rank == TRV_MAX_RANK) return "has too many sizes";
    out->dim[out->rank++] = strtoll(at + 1, &end, 10);
    if (end == at + 1 || (*end && *end != 'x'))
      return "has sizes that are not understood (1x3x224x224)";
    at = end;
  }
  return bad;
}

/* Zeros, or numbers that look like data: uniform in -1..1, small integers. */
static void fill(npy_array* a, int random) {
  uint32_t state = 12345;
  const size_t element = trv_dtype_size(a->dtype), count = a->size / element;
  memset(a->data, 0, a->size);
  for (size_t i = 0; random && i < count; i++) {
    state = state * 1664525u + 1013904223u;
    const float f = (float)(state >> 8) / 8388608.0f - 1.0f;
    const double g = f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint8_t* p = a->data + i * element;
    if (a->dtype == TRV_DTYPE_F32)
      memcpy(p, &f, 4);
    else if (a->dtype == TRV_DTYPE_F64)
      memcpy(p, &g, 8);
    else if (a->dtype == TRV_DTYPE_BF16)
      memcpy(p, (uint8_t*)&bits + 2, 2);
    else if (a->dtype == TRV_DTYPE_F16)
      p[1] = (uint8_t)(0x34 | (state >> 31) << 7); /* +-0.25 */
    else
      p[0] = (uint8_t)(state >> 31);
  }
}

static int invent(const options* o, const trv_slot* slot, npy_array* a, int random) {
  a->dtype = slot->dtype;
  a->rank = slot->rank;
  a->size = trv_dtype_size(slot->dtype);
  for (uint32_t k = 0; k < slot->rank; k++) {
    int64_t n = slot->dim[k];
    if (n < 0)
      n = o->size < slot->min[k] ? slot->min[k] : o->size > slot->max[k] ? slot->max[k] : o->size;
    a->dim[k] = n;
    if (a->size && (uint64_t)n > SIZE_MAX / 2 / a->size)
      return complain("input \"%s\" would be too large", slot->name);
    a->size *= (size_t)n;
  }
  a->data = malloc(a->size + 1);
  if (!a->data) return complain("out of memory");
  fill(a, random);
  return 0;
}

static int bind_inputs(const options* o, job* j, int random) {
  const trv_program* prog = trv_host_program(j->host);
  trv_session* s = trv_context_session(j->ctx, j->entry.index);
  if (o->input_count > j->entry.input_count) {
    return complain("entry \"%s\" takes %u inputs, got %u", j->entry.name,
                    (unsigned)j->entry.input_count, (unsigned)o->input_count);
  }
  j->arrays = calloc((size_t)j->entry.input_count + 1, sizeof(*j->arrays));
  if (!j->arrays) return complain("out of memory");
  for (uint32_t i = 0; i < j->entry.input_count; i++) {
    npy_array* a = &j->arrays[i];
    trv_slot slot;
    if (trv_program_input(prog, j->entry.index, i, &slot))
      return complain("input %u cannot be read", (unsigned)i);
    if (i >= o->input_count) {
      if (invent(o, &slot, a, random)) return 1;
    } else {
      const char *text = o->inputs[i], *end = strrchr(text, '.');
      const int is_npy = end && strcmp(end, ".npy") == 0;
      const char* bad = is_npy ? npy_read(text, a) : read_shaped(text, a);
      if (bad) return complain("%s %s", text, bad);
      if (!is_npy) {
        a->dtype = slot.dtype;
        if (!strrchr(text, '@')) {
          a->rank = slot.rank;
          for (uint32_t k = 0; k < slot.rank; k++) {
            if (slot.dim[k] < 0)
              return complain("%s: input %u has dynamic sizes: %s@SIZES", text, (unsigned)i, text);
            a->dim[k] = slot.dim[k];
          }
        }
      }
    }
    const trv_buf buf = {a->data, 0, a->size};
    if (a->dtype != slot.dtype) {
      return complain("%s: input %u \"%s\" has another dtype: expected %s, got %s", o->inputs[i],
                      (unsigned)i, slot.name, dtype_name(slot.dtype), dtype_name(a->dtype));
    }
    if (trv_session_bind_input(s, i, a->dtype, a->rank, a->dim, buf))
      return complain_diag(trv_session_diag(s), slot.name);
  }
  return 0;
}

/* ---- commands
 * ------------------------------------------------------------------------------------------------------
 */
/* One line for each step that is not done where the file would rather have it. */
static void report_fallbacks(trv_context* ctx, const trv_program* prog) {
  for (uint32_t e = 0; e < prog->entry_count; e++) {
    trv_step step;
    step.size = sizeof(step);
    for (uint32_t i = 0; !trv_session_step(trv_context_session(ctx, e), i, &step); i++) {
      if (!step.alternative) continue;
      complain("step %u runs on alternative %u, not on %s: %s", (unsigned)i,
               (unsigned)step.alternative, step.wanted, step.why ? step.why : "");
    }
  }
}

static int open_job(const options* o, job* j) {
  trv_diag d;
  const double start = now_ms();
  trv_host_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.flags = o->flags;
  desc.threads = o->threads;
  desc.path = o->file;
  desc.weights_path = o->weights;
  desc.devices = strcmp(o->command, "inspect") == 0 ? "cpu" : o->devices;
  desc.plugins = o->plugins;
  desc.plugin_count = o->plugin_count;
  if (trv_host_open_with(&desc, &j->host, &d)) return complain_diag(&d, o->file);
  const trv_program* prog = trv_host_program(j->host);
  if (strcmp(o->command, "inspect") == 0) return 0;
  if (trv_context_open(j->host, 0, &j->ctx, &d)) {
    complain_diag(&d, o->file);
    if (d.time != TRV_NONE)
      complain("there: %s %s", trv_program_debug(prog, 0, d.time, 0),
               trv_program_debug(prog, 0, d.time, 1));
    return 1;
  }
  j->load_ms = now_ms() - start;
  report_fallbacks(j->ctx, prog);
  if (o->entry ? trv_program_find(prog, o->entry, &j->entry)
               : trv_program_entry(prog, 0, &j->entry))
    return complain("%s: there is no entry \"%s\"", o->file, o->entry ? o->entry : "");
  return 0;
}

static int run_once(job* j) {
  trv_session* s = trv_context_session(j->ctx, j->entry.index);
  if (trv_context_run(j->ctx, j->entry.index) == TRV_OK) return 0;
  const trv_diag* d = trv_session_diag(s);
  complain_diag(d, j->entry.name);
  if (d->time != TRV_NONE) {
    const trv_program* prog = trv_host_program(j->host);
    complain("at %s %s %s", trv_program_debug(prog, j->entry.index, d->time, 0),
             trv_program_debug(prog, j->entry.index, d->time, 1),
             trv_program_debug(prog, j->entry.index, d->time, 2));
  }
  return 1;
}

static double element(const trv_tensor* t, size_t i) {
  const uint8_t* p = t->data + i * trv_dtype_size(t->dtype);
  float f;
  double g;
  int32_t w;
  int64_t l;
  uint16_t h;
  memcpy(&h, p, trv_dtype_size(t->dtype) >= 2 ? 2 : 0);
  switch (t->dtype) {
    case TRV_DTYPE_F32:
      return memcpy(&f, p, 4), (double)f;
    case TRV_DTYPE_F64:
      return memcpy(&g, p, 8), g;
    case TRV_DTYPE_I32:
      return memcpy(&w, p, 4), (double)w;
    case TRV_DTYPE_I64:
      return memcpy(&l, p, 8), (double)l;
    case TRV_DTYPE_I16:
      return (int16_t)h;
    case TRV_DTYPE_I8:
      return (int8_t)*p;
    case TRV_DTYPE_BF16: {
      const uint32_t bits = (uint32_t)h << 16;
      return memcpy(&f, &bits, 4), (double)f;
    }
    case TRV_DTYPE_F16: {
      const int exponent = (h >> 10) & 31, fraction = h & 1023;
      double v = exponent ? 1.0 + fraction / 1024.0 : fraction / 1024.0;
      for (int e = exponent ? exponent : 1; e < 15; e++) v /= 2;
      for (int e = exponent; e > 15; e--) v *= 2;
      return h & 0x8000 ? -v : v;
    }
    default:
      return *p;
  }
}

static void describe(const job* j, uint32_t i, const trv_tensor* t) {
  trv_slot slot;
  size_t count = 1;
  if (trv_program_output(trv_host_program(j->host), j->entry.index, i, &slot)) return;
  printf("output %u %s %s [", (unsigned)i, slot.name, dtype_name(t->dtype));
  for (uint32_t k = 0; k < t->rank; k++) {
    printf("%s%lld", k ? ", " : "", (long long)t->dim[k]);
    count *= (size_t)t->dim[k];
  }
  printf("]");
  double low = 0, high = 0, sum = 0;
  for (size_t k = 0; k < count; k++) {
    const double v = element(t, k);
    if (k == 0 || v < low) low = v;
    if (k == 0 || v > high) high = v;
    sum += v;
  }
  if (count) printf("  min %.6g  mean %.6g  max %.6g", low, sum / (double)count, high);
  printf("\n");
}

static int command_run(const options* o, job* j) {
  if (bind_inputs(o, j, 0) || run_once(j)) return 1;
  trv_session* s = trv_context_session(j->ctx, j->entry.index);
  if (o->out) make_folder(o->out);
  for (uint32_t i = 0; i < j->entry.output_count; i++) {
    const trv_tensor* t = trv_session_output(s, i);
    describe(j, i, t);
    if (o->out) {
      char path[4096];
      snprintf(path, sizeof(path), "%s/output_%u.npy", o->out, (unsigned)i);
      if (!npy_write(path, t)) return complain("%s cannot be written", path);
    }
  }
  return 0;
}

static int by_value(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double percentile(const double* sorted, uint32_t n, double p) {
  const double at = p * (double)(n - 1);
  const uint32_t i = (uint32_t)at;
  return i + 1 < n ? sorted[i] + (at - (double)i) * (sorted[i + 1] - sorted[i]) : sorted[n - 1];
}

static int command_bench(const options* o, job* j) {
  double sum = 0, *times = malloc(o->runs * sizeof(*times));
  if (!times) return complain("out of memory");
  int bad = bind_inputs(o, j, 1);
  double first = now_ms();
  if (!bad) bad = run_once(j);
  first = now_ms() - first;
  for (uint32_t i = 0; !bad && i < o->warmup; i++) bad = run_once(j);
  for (uint32_t i = 0; !bad && i < o->runs; i++) {
    const double start = now_ms();
    bad = run_once(j);
    sum += times[i] = now_ms() - start;
  }
  if (!bad) {
    qsort(times, o->runs, sizeof(*times), by_value);
    const double p50 = percentile(times, o->runs, 0.5), p90 = percentile(times, o->runs, 0.9);
    const double p99 = percentile(times, o->runs, 0.99), mean = sum / o->runs;
    printf(o->json ? "{\"file\": \"%s\", \"entry\": \"%s\", \"runs\": %u, \"load_ms\": %.4f, "
                     "\"first_ms\": %.4f, "
                     "\"p50_ms\": %.4f, \"p90_ms\": %.4f, \"p99_ms\": %.4f, \"mean_ms\": %.4f, "
                     "\"min_ms\": %.4f, "
                     "\"max_ms\": %.4f, \"bytes\": %llu, \"peak_bytes\": %lld}\n"
                   : "%s, entry \"%s\", %u runs\n  load %.4f ms, first run %.4f ms\n  p50 %.4f  "
                     "p90 %.4f  p99 %.4f  "
                     "mean %.4f  min %.4f  max %.4f ms\n  memory %llu bytes beside the weights, "
                     "process at most %lld\n",
           o->file, j->entry.name, (unsigned)o->runs, j->load_ms, first, p50, p90, p99, mean,
           times[0], times[o->runs - 1], (unsigned long long)trv_context_bytes(j->ctx),
           peak_bytes());
  }
  free(times);
  return bad;
}

/* All pairs of all entries. */
static int command_selftest(const options* o, job* j) {
  const trv_program* prog = trv_host_program(j->host);
  const uint32_t cases = trv_selftest_cases(prog);
  uint32_t bad = 0;
  trv_session** sessions = malloc(prog->entry_count * sizeof(trv_session*));
  if (!sessions) return complain("out of memory");
  if (!cases) {
    free(sessions);
    return complain("%s has no golden pairs: export(..., golden=3) puts them there", o->file);
  }
  for (uint32_t e = 0; e < prog->entry_count; e++) sessions[e] = trv_context_session(j->ctx, e);
  for (uint32_t i = 0; i < cases; i++) {
    trv_diag d;
    if (trv_selftest(sessions, prog, i, &d) == TRV_OK) continue;
    bad++;
    if (d.status == TRV_DEVICE)
      complain("pair %u: output %u differs first at element %u", (unsigned)i, (unsigned)d.value,
               (unsigned)d.axis);
    else
      complain_diag(&d, o->file);
  }
  free(sessions);
  printf(o->json ? "{\"file\": \"%s\", \"pairs\": %u, \"failed\": %u}\n"
                 : "%s: %u golden pairs, %u failed\n",
         o->file, (unsigned)cases, (unsigned)bad);
  return bad != 0;
}

int main(int argc, char** argv) {
  options o;
  job j = {0};
  if (parse(argc, argv, &o)) return 2;
  const int known =
      o.command && (strcmp(o.command, "inspect") == 0 || strcmp(o.command, "run") == 0 ||
                    strcmp(o.command, "bench") == 0 || strcmp(o.command, "selftest") == 0);
  const int wrong = o.command && !o.help;
  if (o.help || !known || !o.file) {
    fputs(usage, wrong ? stderr : stdout);
    return wrong ? 2 : 0;
  }
  if (strcmp(o.command, "inspect") == 0) o.threads = 1;
  int bad = open_job(&o, &j);
  if (!bad) {
    bad = o.command[0] == 'i'   ? inspect(trv_host_program(j.host), o.file, o.json)
          : o.command[0] == 'r' ? command_run(&o, &j)
          : o.command[0] == 's' ? command_selftest(&o, &j)
                                : command_bench(&o, &j);
  }
  for (uint32_t i = 0; j.arrays && i < j.entry.input_count; i++) free(j.arrays[i].data);
  free(j.arrays);
  trv_context_close(j.ctx);
  trv_host_close(j.host);
  return bad;
}
