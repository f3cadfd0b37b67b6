/* peak.h - measures what kernels are compared with. Private to hal/cpu; tools call it through
 * libtrivet. */
#ifndef TRVK_PEAK_H
#define TRVK_PEAK_H

#include "ops.h"

#define TRVK_PEAK_FMA 0u  /* float32 multiply-adds */
#define TRVK_PEAK_INT8 1u /* 8-bit dot products */
#define TRVK_PEAK_BF16 2u /* bfloat16 dot products */
#define TRVK_PEAK_READ 3u /* reads of buf, 64-byte aligned, size a multiple of 256 */

/* Works for `rounds` on this thread, with the best instructions of this machine; the caller takes
 * the time. Returns how many operations (a multiply-add is two) or bytes that was; 0: the machine
 * has no instruction of that kind. buf, size: of READ, which also writes its first 8 bytes. */
TRV_API double trvk_peak(uint32_t what, void* buf, size_t size, uint64_t rounds);
#endif
