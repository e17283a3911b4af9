#pragma once
#define HAP_PROT_READ 1
#define HAP_PROT_WRITE 2
void *HAP_mmap(void *address, int size, int protection, int flags, int file, long offset);
int HAP_munmap(void *address, int size);
