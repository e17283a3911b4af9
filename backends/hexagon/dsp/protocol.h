/* What the engine and a worker of an NPU say to each other: pi2/backends/hexagon/session.py in C. */
#ifndef PI2_PROTOCOL_H
#define PI2_PROTOCOL_H

#include <stdint.h>

#define PI2_MAGIC 0x4E324950u
#define PI2_PROTOCOL 1u
#define PI2_OPERANDS 28u
#define PI2_NOTHING 0xFFFFFFFFu

enum pi2_failure {
    PI2_FINE = 0,
    PI2_NO_MEMORY = 1,
    PI2_UNKNOWN_GRAPH = 2,
    PI2_OTHER_PROTOCOL = 3,
    PI2_DRIVER_FAILED = 4,
};

/* A hello has the protocol for the number, the memory's file for the graph, its bytes for the count,
   and bytes of scratch of the largest graph for the first operand. */
struct pi2_message {
    uint32_t magic;
    uint32_t number;
    uint32_t graph;
    uint32_t count;
    uint32_t operands[PI2_OPERANDS];
};

struct pi2_reply {
    uint32_t magic;
    uint32_t number;
    uint32_t failure;
    uint32_t graphs;
    uint32_t start_s, start_ns;
    uint32_t end_s, end_ns;
};

_Static_assert(sizeof(struct pi2_message) == 128, "as messages.py has it");
_Static_assert(sizeof(struct pi2_reply) == 32, "as messages.py has it");

#endif
