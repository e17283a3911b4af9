/* The engine's worker on a phone: reads messages (protocol.h) from standard input and passes them on
   to the vendor's driver.  Compiled here against the declarations in check/; it has not run. */
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <linux/dma-buf.h>

#include "AEEStdErr.h"
#include "pi2_npu.h"
#include "protocol.h"
#include "remote.h"

#define URI pi2_npu_URI "&_dom=cdsp"

/* Read all bytes; 0 where there are none any more. */
static int read_all(void *to, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t count = read(STDIN_FILENO, (char *)to + done, size - done);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return 0;
        }
        done += (size_t)count;
    }
    return 1;
}

static int write_reply(const struct pi2_reply *reply) {
    return write(STDOUT_FILENO, reply, sizeof(*reply)) == (ssize_t)sizeof(*reply);
}

static void note_time(uint32_t *seconds, uint32_t *nanoseconds) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *seconds = (uint32_t)now.tv_sec;
    *nanoseconds = (uint32_t)now.tv_nsec;
}

static void synchronise(int file, uint64_t flags) {
    struct dma_buf_sync request = {.flags = flags};
    while (ioctl(file, DMA_BUF_IOCTL_SYNC, &request) < 0 && errno == EINTR) {
    }
}

/* Let programs that the vendor has not signed run on the NPU. */
static void allow_unsigned(void) {
    struct remote_rpc_control_unsigned_module wish = {.domain = CDSP_DOMAIN_ID, .enable = 1};
    remote_session_control(DSPRPC_CONTROL_UNSIGNED_MODULE, &wish, sizeof(wish));
}

/* Let the driver look for libpi2_npu_skel.so where the library of graphs is, unless it was told. */
static void name_folder(char *library) {
    const char *folder = dirname(library);
    setenv("ADSP_LIBRARY_PATH", folder, 0);
    setenv("DSP_LIBRARY_PATH", folder, 0);
}

int main(int count, char **arguments) {
    if (count > 1) {
        name_folder(arguments[1]);
    }
    struct pi2_message message;
    struct pi2_reply reply = {.magic = PI2_MAGIC, .number = PI2_PROTOCOL};
    remote_handle64 handle = 0;
    if (!read_all(&message, sizeof(message))) {
        return 0;
    }
    int file = (int)message.graph;
    uint32_t own = 0;
    allow_unsigned();
    if (message.magic != PI2_MAGIC || message.number != PI2_PROTOCOL) {
        reply.failure = PI2_OTHER_PROTOCOL;
    } else if (pi2_npu_open(URI, &handle) != AEE_SUCCESS) {
        reply.failure = PI2_DRIVER_FAILED;
    } else if (fastrpc_mmap(CDSP_DOMAIN_ID, file, NULL, 0, message.count, FASTRPC_MAP_FD) != 0 ||
               pi2_npu_map(handle, file, message.count, message.operands[0], &reply.graphs, &own) !=
                   AEE_SUCCESS) {
        reply.failure = PI2_NO_MEMORY;
    }
    if (!write_reply(&reply) || reply.failure != PI2_FINE) {
        return 1;
    }
    fprintf(stderr, "%u bytes of the NPU's own memory\n", own);
    reply.graphs = 0;
    while (read_all(&message, sizeof(message))) {
        reply.number = message.number;
        note_time(&reply.start_s, &reply.start_ns);
        if (message.graph != PI2_NOTHING) {
            synchronise(file, DMA_BUF_SYNC_END | DMA_BUF_SYNC_WRITE);
            int status = pi2_npu_run(handle, message.graph, message.operands, (int)message.count);
            synchronise(file, DMA_BUF_SYNC_START | DMA_BUF_SYNC_READ);
            reply.failure = status == AEE_SUCCESS   ? PI2_FINE
                            : status == AEE_EBADPARM ? PI2_UNKNOWN_GRAPH
                                                     : PI2_DRIVER_FAILED;
        }
        note_time(&reply.end_s, &reply.end_ns);
        if (!write_reply(&reply)) {
            break;
        }
    }
    pi2_npu_close(handle);
    return 0;
}
