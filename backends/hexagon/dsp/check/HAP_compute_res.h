#pragma once
typedef struct {
    unsigned int hidden[32];
} compute_res_attr_t;
int HAP_compute_res_attr_init(compute_res_attr_t *attributes);
int HAP_compute_res_attr_set_vtcm_param(compute_res_attr_t *attributes, unsigned int size,
                                        unsigned char in_one_page);
unsigned int HAP_compute_res_acquire(compute_res_attr_t *attributes, unsigned int timeout_us);
void *HAP_compute_res_attr_get_vtcm_ptr(compute_res_attr_t *attributes);
int HAP_compute_res_release(unsigned int id);
