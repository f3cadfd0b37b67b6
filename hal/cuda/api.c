/* api.c - finds the CUDA driver when the first device is opened. */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#endif
#include <string.h>

#include "api.h"

#if defined(_WIN32) || !defined(RTLD_NOW)
const char* trvu_load(trvu_api* api) {
  memset(api, 0, sizeof(*api));
  return "CUDA is not available on this system";
}
void trvu_unload(trvu_api* api) { (void)api; }
#else
static int find(void* library, const char* name, void* field) {
  void* p = dlsym(library, name);
  memcpy(field, &p, sizeof p); /* object to function pointer, as POSIX has it */
  return p != NULL;
}

const char* trvu_load(trvu_api* api) {
  int needed = 1, graphs = 1;
  memset(api, 0, sizeof(*api));
  api->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!api->library) return "there is no CUDA driver (libcuda.so.1)";
#define TRVU_FIND(name, args) needed &= find(api->library, #name, &api->name);
  TRVU_NEEDED(TRVU_FIND)
#undef TRVU_FIND
#define TRVU_FIND(name, args) graphs &= find(api->library, #name, &api->name);
  TRVU_GRAPHS(TRVU_FIND)
#undef TRVU_FIND
  api->graphs = graphs;
  return needed ? NULL : "the CUDA driver is too old (11.4 or newer is needed)";
}

void trvu_unload(trvu_api* api) {
  if (api->library) dlclose(api->library);
  api->library = NULL;
}
#endif
