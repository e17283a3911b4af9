/* The NPU's side of pi2_npu.idl: maps the memory and runs graphs of the library that it is linked
   with.  Compiled here against the declarations in check/; it has not run on an NPU. */
#include <stdint.h>
#include <stdlib.h>

#include "AEEStdErr.h"
#include "HAP_compute_res.h"
#include "HAP_mem.h"
#include "HAP_power.h"
#include "pi2_npu.h"
#include "qurt.h"

/* Of the library: kernels/program.py. */
extern int pi2_run(int memory, int graph, int operands);
extern int pi2_count(int address);

#define MOST_OPERANDS 28
#define PATIENCE_US 100000

static uint32_t count_graphs(void) {
    uint32_t count = 0;
    pi2_count((int)(uintptr_t)&count);
    return count;
}

struct session {
    uint8_t *memory;
    uint32_t size;
    uint8_t *own;
    uint32_t own_size;
    unsigned int own_id;
};

int pi2_npu_open(const char *uri, remote_handle64 *handle) {
    (void)uri;
    struct session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return AEE_ENOMEMORY;
    }
    *handle = (remote_handle64)(uintptr_t)session;
    HAP_power_request_t request = {0};
    request.type = HAP_power_set_HVX;
    request.hvx.power_up = 1;
    return HAP_power_set(session, &request) == 0 ? AEE_SUCCESS : AEE_EFAILED;
}

int pi2_npu_close(remote_handle64 handle) {
    struct session *session = (struct session *)(uintptr_t)handle;
    if (session->own_id != 0) {
        HAP_compute_res_release(session->own_id);
    }
    if (session->memory != NULL) {
        HAP_munmap(session->memory, (int)session->size);
    }
    free(session);
    return AEE_SUCCESS;
}

/* Take memory of the NPU's own; without it, scratch stays where the engine has put it. */
static void take_own(struct session *session, uint32_t scratch) {
    compute_res_attr_t wanted;
    if (scratch == 0 || HAP_compute_res_attr_init(&wanted) != 0 ||
        HAP_compute_res_attr_set_vtcm_param(&wanted, scratch, 1) != 0) {
        return;
    }
    session->own_id = HAP_compute_res_acquire(&wanted, PATIENCE_US);
    if (session->own_id != 0) {
        session->own = HAP_compute_res_attr_get_vtcm_ptr(&wanted);
        session->own_size = scratch;
    }
}

int pi2_npu_map(remote_handle64 handle, int32_t file, uint32_t size, uint32_t scratch,
                uint32_t *graphs, uint32_t *own) {
    struct session *session = (struct session *)(uintptr_t)handle;
    void *memory = HAP_mmap(NULL, (int)size, HAP_PROT_READ | HAP_PROT_WRITE, 0, file, 0);
    if (memory == (void *)-1) {
        return AEE_ENOMEMORY;
    }
    session->memory = memory;
    session->size = size;
    take_own(session, scratch);
    *graphs = count_graphs();
    *own = session->own_size;
    return AEE_SUCCESS;
}

int pi2_npu_run(remote_handle64 handle, uint32_t graph, const uint32_t *operands, int count) {
    struct session *session = (struct session *)(uintptr_t)handle;
    uint32_t given[MOST_OPERANDS];
    if (graph >= count_graphs() || count < 1 || count > MOST_OPERANDS) {
        return AEE_EBADPARM;
    }
    for (int place = 0; place < count; place++) {
        given[place] = operands[place];
    }
    if (session->own != NULL) {
        /* Places are added to the memory's address, and addresses have 32 bits. */
        given[count - 1] = (uint32_t)(uintptr_t)session->own - (uint32_t)(uintptr_t)session->memory;
    }
    if (qurt_hvx_lock(QURT_HVX_MODE_128B) != QURT_EOK) {
        return AEE_EFAILED;
    }
    pi2_run((int)(uintptr_t)session->memory, (int)graph, (int)(uintptr_t)given);
    qurt_hvx_unlock();
    /* The engine's cores do not look into the NPU's caches. */
    qurt_mem_cache_clean((qurt_addr_t)(uintptr_t)session->memory, session->size,
                         QURT_MEM_CACHE_FLUSH_ALL, QURT_MEM_DCACHE);
    return AEE_SUCCESS;
}
