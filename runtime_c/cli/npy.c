/* npy.c - numpy's .npy format: a magic, a Python dict as text, raw data. */
#include "npy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char* const descr[TRV_DTYPE_COUNT] = {"",    "|b1", "|u1", "|i1", "<i2", "<i4",
                                                   "<i8", "<f2", "<V2", "<f4", "<f8"};

const char* npy_read_raw(const char* path, npy_array* out) {
  FILE* f = fopen(path, "rb");
  memset(out, 0, sizeof(*out));
  if (!f) return "cannot be opened";
  size_t room = 1 << 16;
  out->data = malloc(room);
  while (out->data) {
    out->size += fread(out->data + out->size, 1, room - out->size, f);
    if (out->size < room) break;
    uint8_t* more = room > SIZE_MAX / 2 ? NULL : realloc(out->data, room *= 2);
    if (!more) free(out->data);
    out->data = more;
  }
  const int bad = ferror(f);
  fclose(f);
  if (!out->data) return "does not fit in memory";
  return bad ? "cannot be read" : NULL;
}

/* The text after a key of the header's dict, NULL if the key is missing. */
static const char* after(const char* header, const char* key) {
  const char* at = strstr(header, key);
  at = at ? strchr(at, ':') : NULL;
  while (at && (*at == ':' || *at == ' ')) at++;
  return at;
}

static const char* parse_header(const char* header, npy_array* out) {
  const char *d = after(header, "'descr'"), *order = after(header, "'fortran_order'"),
             *shape = after(header, "'shape'");
  if (!d || !order || !shape || *d != '\'' || *shape != '(')
    return "has a header that is not understood";
  if (strncmp(order, "True", 4) == 0) return "is in Fortran order; save it C-contiguous";
  for (uint32_t i = 1; i < TRV_DTYPE_COUNT; i++) {
    const char other = d[1] == '=' ? '<' : d[1];
    if ((other == descr[i][0] || d[1] == '|') &&
        strncmp(d + 2, descr[i] + 1, strlen(descr[i]) - 1) == 0 && d[1 + strlen(descr[i])] == '\'')
      out->dtype = i;
  }
  if (!out->dtype) return "has a dtype that programs do not take";
  for (shape++; *shape && *shape != ')';) {
    char* end;
    if (*shape == ',' || *shape == ' ') {
      shape++;
      continue;
    }
    const long long n = strtoll(shape, &end, 10);
    if (end == shape || n < 0 || out->rank == TRV_MAX_RANK)
      return "has a shape that is not understood";
    out->dim[out->rank++] = n;
    shape = end;
  }
  return NULL;
}

const char* npy_read(const char* path, npy_array* out) {
  const char* bad = npy_read_raw(path, out);
  if (bad) return bad;
  const uint8_t* p = out->data;
  if (out->size < 12 || memcmp(p, "\x93NUMPY", 6) != 0) return "is not an .npy file";
  const size_t start = p[6] == 1 ? 10 : 12;
  size_t length = (size_t)p[8] | (size_t)p[9] << 8;
  if (p[6] > 1) length |= (size_t)p[10] << 16 | (size_t)p[11] << 24;
  if (length > out->size - start) return "is truncated";
  char* header = malloc(length + 1);
  if (!header) return "does not fit in memory";
  memcpy(header, p + start, length);
  header[length] = 0;
  bad = parse_header(header, out);
  free(header);
  if (bad) return bad;
  size_t want = trv_dtype_size(out->dtype);
  for (uint32_t i = 0; i < out->rank; i++) {
    if (out->dim[i] && want > SIZE_MAX / (uint64_t)out->dim[i]) return "is too large";
    want *= (size_t)out->dim[i];
  }
  out->size -= start + length;
  if (out->size < want) return "is truncated";
  memmove(out->data, out->data + start + length, want);
  out->size = want;
  return NULL;
}

int npy_write(const char* path, const trv_tensor* t) {
  char header[512];
  int n = snprintf(header, sizeof(header), "{'descr': '%s', 'fortran_order': False, 'shape': (",
                   descr[t->dtype]);
  size_t bytes = trv_dtype_size(t->dtype);
  for (uint32_t i = 0; i < t->rank; i++) {
    n += snprintf(header + n, sizeof(header) - (size_t)n, "%lld,", (long long)t->dim[i]);
    bytes *= (size_t)t->dim[i];
  }
  n += snprintf(header + n, sizeof(header) - (size_t)n, "), }");
  while ((n + 11) % 64) header[n++] = ' ';
  header[n++] = '\n';
  const uint8_t start[10] = {
      0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (uint8_t)(n & 255), (uint8_t)(n >> 8)};
  FILE* f = fopen(path, "wb");
  if (!f) return 0;
  const int ok = fwrite(start, 1, sizeof(start), f) == sizeof(start) &&
                 fwrite(header, 1, (size_t)n, f) == (size_t)n &&
                 (bytes == 0 || fwrite(t->data, 1, bytes, f) == bytes);
  return fclose(f) == 0 && ok;
}
