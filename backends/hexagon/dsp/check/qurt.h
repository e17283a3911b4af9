#pragma once
#define QURT_EOK 0
typedef unsigned int qurt_addr_t;
typedef unsigned int qurt_size_t;
typedef enum { QURT_HVX_MODE_64B, QURT_HVX_MODE_128B } qurt_hvx_mode_t;
typedef enum { QURT_MEM_CACHE_FLUSH, QURT_MEM_CACHE_FLUSH_ALL = 5 } qurt_mem_cache_op_t;
typedef enum { QURT_MEM_ICACHE, QURT_MEM_DCACHE } qurt_mem_cache_type_t;
int qurt_hvx_lock(qurt_hvx_mode_t mode);
int qurt_hvx_unlock(void);
int qurt_mem_cache_clean(qurt_addr_t address, qurt_size_t size, qurt_mem_cache_op_t operation,
                         qurt_mem_cache_type_t type);
