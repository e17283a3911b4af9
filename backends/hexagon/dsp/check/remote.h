#pragma once
#include <stddef.h>
#include <stdint.h>
typedef uint64_t remote_handle64;
#define CDSP_DOMAIN_ID 3
#define DSPRPC_CONTROL_UNSIGNED_MODULE 2
enum fastrpc_map_flags { FASTRPC_MAP_STATIC, FASTRPC_MAP_RESERVED, FASTRPC_MAP_FD };
struct remote_rpc_control_unsigned_module {
    int domain;
    int enable;
};
int remote_session_control(uint32_t request, void *data, uint32_t size);
int fastrpc_mmap(int domain, int file, void *address, int offset, size_t length,
                 enum fastrpc_map_flags flags);
