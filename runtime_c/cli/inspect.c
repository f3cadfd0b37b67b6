/* inspect.c - "trv_run inspect": what is in a program, for people or as JSON. */
#include "inspect.h"

#include <stdio.h>
#include <string.h>

static const char* const dtypes[TRV_DTYPE_COUNT] = {"none", "bool", "u8",   "i8",  "i16", "i32",
                                                    "i64",  "f16",  "bf16", "f32", "f64"};
static const char* const kinds[TRV_REGION_KIND_COUNT] = {"CONST", "ARENA", "STATE", "IO"};

const char* dtype_name(uint32_t dtype) { return dtype < TRV_DTYPE_COUNT ? dtypes[dtype] : "?"; }

static void print_json_text(const char* text) {
  putchar('"');
  for (; *text; text++) {
    if (*text == '"' || *text == '\\')
      printf("\\%c", *text);
    else if ((unsigned char)*text < 32)
      printf("\\u%04x", (unsigned)*text);
    else
      putchar(*text);
  }
  putchar('"');
}

static void print_shape(const trv_slot* s, int json) {
  putchar('[');
  for (uint32_t i = 0; i < s->rank; i++) {
    if (i) printf(", ");
    if (s->dim[i] >= 0)
      printf("%lld", (long long)s->dim[i]);
    else if (json)
      printf("[%lld, %lld]", (long long)s->min[i], (long long)s->max[i]);
    else if (s->max[i] > (int64_t)1 << 40)
      printf("%lld..", (long long)s->min[i]);
    else
      printf("%lld..%lld", (long long)s->min[i], (long long)s->max[i]);
  }
  putchar(']');
}

static void print_slots(const trv_program* prog, const trv_entry* e, int output, int json) {
  const uint32_t n = output ? e->output_count : e->input_count;
  if (json) printf("\"%s\": [", output ? "outputs" : "inputs");
  for (uint32_t i = 0; i < n; i++) {
    trv_slot s;
    if (output ? trv_program_output(prog, e->index, i, &s)
               : trv_program_input(prog, e->index, i, &s))
      continue;
    if (json) {
      printf("%s{\"name\": ", i ? ", " : "");
      print_json_text(s.name);
      printf(", \"dtype\": \"%s\", \"shape\": ", dtype_name(s.dtype));
    } else {
      printf("  %-6s %2u  %-20s %-5s ", output ? "output" : "input", (unsigned)i, s.name,
             dtype_name(s.dtype));
    }
    print_shape(&s, json);
    printf(json ? "}" : "\n");
  }
  if (json) printf("], ");
}

static void print_regions(const trv_program* prog, const trv_entry* e, int json) {
  if (json) printf("\"regions\": [");
  for (uint32_t i = 0; i < e->region_count; i++) {
    trv_region r;
    if (trv_program_region(prog, e->index, i, &r)) continue;
    if (json) {
      printf("%s{\"kind\": \"%s\", \"id\": %u, \"size\": %llu, \"align\": %u, \"dynamic\": %s}",
             i ? ", " : "", kinds[r.kind], (unsigned)r.id, (unsigned long long)r.size,
             (unsigned)r.align, r.flags & 1 ? "true" : "false");
    } else if (r.kind != TRV_REGION_KIND_IO) {
      printf("  region %2u  %-5s %14llu bytes  id %u%s\n", (unsigned)i, kinds[r.kind],
             (unsigned long long)r.size, (unsigned)r.id, r.flags & 1 ? "  depends on sizes" : "");
    }
  }
  if (json) printf("]");
}

/* What each time does, where the debug table is there. */
static void print_times(const trv_program* prog, const trv_entry* e, int json) {
  static const char* const fields[] = {"op", "module", "source", "placement"};
  if (json) printf(", \"times\": [");
  for (uint32_t t = 0; t < e->times; t++) {
    const char* op = trv_program_debug(prog, e->index, t, 0);
    if (json) {
      printf("%s{", t ? ", " : "");
      for (uint32_t f = 0; f < 4; f++) {
        printf("%s\"%s\": ", f ? ", " : "", fields[f]);
        print_json_text(trv_program_debug(prog, e->index, t, f));
      }
      printf("}");
    } else if (*op) {
      printf("  time %4u  %-40s %s\n", (unsigned)t, op, trv_program_debug(prog, e->index, t, 1));
    }
  }
  if (json) printf("]");
}

int inspect(const trv_program* prog, const char* path, int json) {
  if (json) {
    printf("{\"file\": ");
    print_json_text(path);
    printf(", \"size\": %llu, \"entries\": [", (unsigned long long)prog->file.size);
  } else {
    printf("%s: %llu bytes, %u entries, %u segments\n", path, (unsigned long long)prog->file.size,
           (unsigned)prog->entry_count, (unsigned)prog->segment_count);
  }
  for (uint32_t i = 0; i < prog->entry_count; i++) {
    trv_entry e;
    if (trv_program_entry(prog, i, &e)) return 1;
    if (json) {
      printf("%s{\"name\": ", i ? ", " : "");
      print_json_text(e.name);
      printf(
          ", \"steps\": %u, \"parts\": %u, \"values\": %u, \"storages\": %u, \"lower_bound\": "
          "%llu, ",
          (unsigned)e.step_count, (unsigned)e.part_count, (unsigned)e.value_count,
          (unsigned)e.storage_count, (unsigned long long)e.lower_bound);
    } else {
      printf(
          "entry %u \"%s\": %u steps, %u parts, %u times, %u values, %u storages, arena's lower "
          "bound %llu bytes\n",
          (unsigned)i, e.name, (unsigned)e.step_count, (unsigned)e.part_count, (unsigned)e.times,
          (unsigned)e.value_count, (unsigned)e.storage_count, (unsigned long long)e.lower_bound);
    }
    print_slots(prog, &e, 0, json);
    print_slots(prog, &e, 1, json);
    print_regions(prog, &e, json);
    print_times(prog, &e, json);
    if (json) printf("}");
  }
  if (json) printf("]}\n");
  return 0;
}
