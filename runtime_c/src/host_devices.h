/* host_devices.h - devices of a host: built-in drivers, plug-ins, devices that the app has opened.
 */
#ifndef TRV_HOST_DEVICES_H
#define TRV_HOST_DEVICES_H

#include "trivet/trivet.h"

#define TRVI_DEVICES 16 /* most that a host has */

typedef struct trvi_devices {
  trv_bound_device bound[TRVI_DEVICES]; /* in order of preference */
  void* memories[TRVI_DEVICES];         /* of those that are the host's own */
  void* libraries[TRVI_DEVICES];        /* plug-ins */
  const trv_driver* plugins[TRVI_DEVICES];
  uint32_t count, plugin_count;
} trvi_devices;

/* Opens what desc asks for, for the parts of prog. Closed by trvi_devices_close, after errors too.
 */
trv_status trvi_devices_open(trvi_devices* d, const trv_host_desc* desc, const trv_program* prog,
                             trv_diag* diag);
void trvi_devices_close(trvi_devices* d);
#endif
