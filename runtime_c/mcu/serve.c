/* serve.c - requests of a host, one a line, and the answers. All numbers are hexadecimal, so that
 * no division and no printf come into the image. */
#include "serve.h"

#include <string.h>

#include "model.h"

#define LINE 144 /* longest request: 48 bytes of data */
#define GET_MOST 48

typedef struct line {
  char text[LINE];
  const char* at;
  uint8_t bad; /* something is missing or no number */
} line;

typedef struct server {
  trv_session* const* sessions;
  uint64_t begin; /* of the command that runs */
  int status;
} server;

/* ---- lines out: a '*' and the exclusive or of all bytes before it end them ---- */
static void put(uint8_t* sum, char c) {
  *sum ^= (uint8_t)c;
  port_put((uint8_t)c);
}

static void put_text(uint8_t* sum, const char* s) {
  while (*s) put(sum, *s++);
}

static void put_hex(uint8_t* sum, uint32_t v, int digits) {
  while (digits-- > 0) put(sum, "0123456789abcdef"[v >> (4 * digits) & 15]);
}

static void put_number(uint8_t* sum, uint64_t v) {
  int digits = 1;
  while (digits < 16 && v >> (4 * digits)) digits++;
  put(sum, ' ');
  if (digits > 8) put_hex(sum, (uint32_t)(v >> 32), digits - 8);
  put_hex(sum, (uint32_t)v, digits > 8 ? 8 : digits);
}

static void put_end(uint8_t* sum) {
  const uint8_t all = *sum;
  put(sum, '*');
  put_hex(sum, all, 2);
  port_put('\n');
}

/* One line: a word, numbers, a text ("" for none). */
static void say(const char* word, const uint64_t* numbers, int count, const char* about) {
  uint8_t sum = 0;
  put_text(&sum, word);
  for (int i = 0; i < count; i++) put_number(&sum, numbers[i]);
  if (*about) put(&sum, ' ');
  put_text(&sum, about);
  put_end(&sum);
}

static void say1(const char* word, uint64_t a, const char* about) { say(word, &a, 1, about); }

static void say_diag(const trv_diag* d) {
  const uint64_t n[] = {(uint32_t)-d->status,  d->step,         d->time, d->value, d->axis,
                        (uint64_t)d->expected, (uint64_t)d->got};
  say("error", n, 7, d->what ? d->what : "");
}

static int digit(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* ---- lines in ---- */
/* 0: no more lines. Lines with a wrong sum are marked bad; people may leave the sum out. */
static int read_line(line* l) {
  uint32_t n = 0;
  uint8_t sum = 0;
  for (int c = port_get(); c != '\n'; c = port_get()) {
    if (c == PORT_END) return 0;
    if (c == '\r') continue;
    if (n < LINE - 1) l->text[n++] = (char)c;
  }
  l->text[n] = 0;
  l->at = l->text;
  l->bad = n == LINE - 1;
  char* star = n >= 3 ? &l->text[n - 3] : l->text;
  if (n < 3 || *star != '*') return 1;
  *star = 0;
  for (const char* p = l->text; *p; p++) sum ^= (uint8_t)*p;
  l->bad |= digit(star[1]) * 16 + digit(star[2]) != sum;
  return 1;
}

/* Is that the next word? */
static int word(line* l, const char* w) {
  const char* p = l->at;
  for (; *w && *p == *w; p++, w++) {
  }
  if (*w || (*p && *p != ' ')) return 0;
  l->at = p;
  return 1;
}

static uint32_t next_number(line* l) {
  uint32_t v = 0, digits = 0;
  while (*l->at == ' ') l->at++;
  for (; digit(*l->at) >= 0; l->at++, digits++) v = v << 4 | (uint32_t)digit(*l->at);
  if (digits == 0 || digits > 8 || (*l->at && *l->at != ' ')) l->bad = 1;
  return v;
}

/* ---- requests ---- */
static size_t bytes_of(const trv_tensor* t) {
  size_t n = trv_dtype_size(t->dtype);
  for (uint32_t i = 0; i < t->rank; i++) n *= (size_t)t->dim[i];
  return n;
}

static void say_slot(const char* kind, uint32_t e, uint32_t i, const trv_tensor* t) {
  const uint64_t n[] = {e, i, t->dtype, bytes_of(t)};
  say(kind, n, 4, "");
}

static void do_about(const server* v, const trv_program* prog, uint64_t start) {
  say1("trivet", 1, MODEL_TARGET);
  say1("program", MODEL_PROGRAM_BYTES, MODEL_NAME);
  say1("crc", MODEL_PROGRAM_CRC, "");
  say1("rate", port_rate(), port_unit());
  say1("start", start, "");
  say1("arena", MODEL_ARENA_BYTES, "");
  say1("session", MODEL_SESSION_BYTES, "");
  for (uint32_t e = 0; e < prog->entry_count; e++) {
    trv_entry entry;
    if (trv_program_entry(prog, e, &entry)) continue;
    say1("entry", e, entry.name);
    for (uint32_t i = 0; i < entry.input_count; i++)
      say_slot("input", e, i, trv_session_input(v->sessions[e], i));
    for (uint32_t i = 0; i < entry.output_count; i++)
      say_slot("output", e, i, trv_session_output(v->sessions[e], i));
  }
}

/* The tensor that "E I" names; NULL: none. */
static const trv_tensor* slot(const server* v, line* l, int output) {
  const uint32_t e = next_number(l), i = next_number(l);
  if (l->bad || e >= MODEL_ENTRIES) return NULL;
  return output ? trv_session_output(v->sessions[e], i) : trv_session_input(v->sessions[e], i);
}

static int do_set(const server* v, line* l) {
  const trv_tensor* t = slot(v, l, 0);
  const uint32_t at = next_number(l);
  while (*l->at == ' ') l->at++;
  const size_t digits = strlen(l->at);
  if (l->bad || !t || digits % 2 || digits / 2 > bytes_of(t) || at > bytes_of(t) - digits / 2)
    return 0;
  for (const char* p = l->at; *p; p++)
    if (digit(*p) < 0) return 0;
  for (size_t i = 0; i < digits / 2; i++)
    t->data[at + i] = (uint8_t)(digit(l->at[2 * i]) << 4 | digit(l->at[2 * i + 1]));
  return 1;
}

static int do_get(const server* v, line* l) {
  const trv_tensor* t = slot(v, l, 1);
  const uint32_t at = next_number(l), count = next_number(l);
  uint8_t sum = 0;
  if (l->bad || !t || count > GET_MOST || count > bytes_of(t) || at > bytes_of(t) - count) return 0;
  put_text(&sum, "data ");
  for (uint32_t i = 0; i < count; i++) put_hex(&sum, t->data[at + i], 2);
  put_end(&sum);
  return 1;
}

static trv_status run(server* v, uint32_t e) {
  const uint64_t begin = port_ticks();
  const trv_status st = trv_session_run(v->sessions[e]);
  if (!st) say1("time", port_ticks() - begin, "");
  return st;
}

static void on_begin(void* self, uint32_t time) {
  (void)time;
  ((server*)self)->begin = port_ticks();
}

static void on_end(void* self, uint32_t time) {
  const uint64_t n[] = {time, port_ticks() - ((server*)self)->begin};
  say("step", n, 2, "");
}

static trv_status run_steps(server* v, uint32_t e) {
  const trv_hooks hooks = {.size = sizeof hooks, .begin = on_begin, .end = on_end, .self = v};
  trv_session_hooks(v->sessions[e], &hooks);
  const trv_status st = trv_session_run(v->sessions[e]);
  trv_session_hooks(v->sessions[e], NULL);
  return st;
}

#ifdef MODEL_GOLDEN
/* Every golden pair; the status stays for the program's end. */
static void do_selftest(server* v, const trv_program* prog) {
  v->status = 0;
  for (uint32_t i = 0; i < trv_selftest_cases(prog); i++) {
    trv_diag d;
    if (trv_selftest(v->sessions, prog, i, &d)) {
      v->status = 1;
      say_diag(&d);
    } else {
      say1("pass", i, "");
    }
  }
}
#endif

/* One request; 0: it was understood, or its error is told. */
static int answer(server* v, line* l) {
  trv_status st = TRV_OK;
  uint32_t e = 0;
  if (word(l, "set")) return !do_set(v, l);
  if (word(l, "get")) return !do_get(v, l);
  if (word(l, "stack")) return say1("stack", port_stack(), ""), 0;
  const int kind = word(l, "run") ? 1 : word(l, "steps") ? 2 : word(l, "reset") ? 3 : 0;
  if (kind == 0) return 1;
  e = next_number(l);
  uint32_t count = kind == 1 ? next_number(l) : 1;
  if (l->bad || e >= MODEL_ENTRIES) return 1;
  for (; !st && count; count--)
    st = kind == 1 ? run(v, e) : kind == 2 ? run_steps(v, e) : trv_session_reset(v->sessions[e]);
  if (st) say_diag(trv_session_diag(v->sessions[e]));
  return st ? -1 : 0;
}

int serve(trv_program* program, trv_session* const* sessions, trv_status st, const trv_diag* diag,
          uint64_t start) {
  server v = {.sessions = sessions};
  line l;
  while (read_line(&l)) {
    if (l.bad) {
      say("again", NULL, 0, "");
      continue;
    }
    if (word(&l, "quit")) break;
    if (st) {
      say_diag(diag);
      continue;
    }
    int wrong = 0;
    if (word(&l, "about")) do_about(&v, program, start);
#ifdef MODEL_GOLDEN
    else if (word(&l, "selftest"))
      do_selftest(&v, program);
#endif
    else
      wrong = answer(&v, &l);
    if (wrong == 0) say("ok", NULL, 0, "");
    if (wrong == 1) say("what", NULL, 0, "");
  }
  return v.status;
}
