/* What the vendor's interface compiler makes of pi2_npu.idl. */
#pragma once
#include "remote.h"
#define pi2_npu_URI "file:///libpi2_npu_skel.so?pi2_npu_skel_handle_invoke&_modver=1.0"
int pi2_npu_open(const char *uri, remote_handle64 *handle);
int pi2_npu_close(remote_handle64 handle);
int pi2_npu_map(remote_handle64 handle, int32_t file, uint32_t size, uint32_t scratch,
                uint32_t *graphs, uint32_t *own);
int pi2_npu_run(remote_handle64 handle, uint32_t graph, const uint32_t *operands, int count);
