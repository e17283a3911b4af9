#pragma once
typedef enum { HAP_power_set_HVX = 4 } HAP_Power_request_type;
typedef struct {
    HAP_Power_request_type type;
    struct {
        int power_up;
    } hvx;
} HAP_power_request_t;
int HAP_power_set(void *context, HAP_power_request_t *request);
