/* variant.h - one source, several instruction sets.
 *
 * The families below are plain C that the compiler vectorises. The library holds them as they are
 * ("ref") and once more for each wider instruction set: simd_<isa>.c includes their sources after
 * setting the target and TRVK_VARIANT, the suffix of everything that would clash. Checks and tile
 * counts exist once. Results are the same bit for bit: no operation is contracted or reordered.
 */
#ifndef TRVK_VARIANT_H
#define TRVK_VARIANT_H

#define TRVK_PASTE_(a, b) a##b
#define TRVK_PASTE(a, b) TRVK_PASTE_(a, b)

#ifndef TRVK_VARIANT
#define TRVK_KERNEL(op) trvk_##op##__ref
#else
#define TRVK_KERNEL(op) TRVK_PASTE(trvk_##op, TRVK_VARIANT)
#define trvk_load TRVK_PASTE(trvk_load_any, TRVK_VARIANT)
#define trvk_store TRVK_PASTE(trvk_store_any, TRVK_VARIANT)
#define trvk_cast TRVK_PASTE(trvk_cast_any, TRVK_VARIANT)
#define trvk_narrow TRVK_PASTE(trvk_narrow_any, TRVK_VARIANT)
#define trvk_load_f32 TRVK_PASTE(trvk_load_f32_any, TRVK_VARIANT)
#define trvk_load_f64 TRVK_PASTE(trvk_load_f64_any, TRVK_VARIANT)
#define trvk_load_i64 TRVK_PASTE(trvk_load_i64_any, TRVK_VARIANT)
#define trvk_store_f32 TRVK_PASTE(trvk_store_f32_any, TRVK_VARIANT)
#define trvk_store_i64 TRVK_PASTE(trvk_store_i64_any, TRVK_VARIANT)
#define trvk_map_f32 TRVK_PASTE(trvk_map_f32_any, TRVK_VARIANT)
#define trvk_map_f64 TRVK_PASTE(trvk_map_f64_any, TRVK_VARIANT)
#define trvk_map_i32 TRVK_PASTE(trvk_map_i32_any, TRVK_VARIANT)
#define trvk_map_i64 TRVK_PASTE(trvk_map_i64_any, TRVK_VARIANT)
#define trvk_map_bool TRVK_PASTE(trvk_map_bool_any, TRVK_VARIANT)
#define trvk_lookup_row TRVK_PASTE(trvk_lookup_row_any, TRVK_VARIANT)
#define trvk_sums_begin TRVK_PASTE(trvk_sums_begin_any, TRVK_VARIANT)
#define trvk_sums_add TRVK_PASTE(trvk_sums_add_any, TRVK_VARIANT)
#define trvk_average_count TRVK_PASTE(trvk_average_count_any, TRVK_VARIANT)
#define trvk_average_of TRVK_PASTE(trvk_average_of_any, TRVK_VARIANT)
#define trvk_average_store TRVK_PASTE(trvk_average_store_any, TRVK_VARIANT)
#endif
#endif
