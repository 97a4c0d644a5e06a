/*
 * Hands the KV of a prompt from one process to another.
 *
 *   handoff source                  prints the address of the source, then serves one prompt
 *   handoff destination ADDRESS     asks for the KV of the prompt, and checks each byte
 *
 * The source has the layout [layer][page][token][K|V][element], the destination
 * [page][layer][K|V][token][element], with other page sizes. Each value names its place.
 */
#include "baton.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 100, LAYERS = 2, HEAD = 4, PAGES = 64, PAGE_SOURCE = 16, PAGE_DESTINATION = 8 };
#define ROOM 7
#define DEADLINE_MS 20000

/* Ends the program if a call failed. A real engine reports the error and goes on. */
static int checked(int result, const char *call)
{
    char text[256];
    if (result >= 0)
        return result;
    baton_last_error(text, sizeof text);
    fprintf(stderr, "%s: %s: %s\n", call, baton_error_name(result), text);
    exit(1);
}
#define CHECK(call) checked((call), #call)

static baton_layout layout_of(int is_source)
{
    const uint64_t head = HEAD * sizeof(float);
    baton_layout layout = {0};
    layout.pages = PAGES;
    layout.page_size = is_source ? PAGE_SOURCE : PAGE_DESTINATION;
    layout.layers = LAYERS;
    layout.kv_heads = 1;
    layout.head_dim = HEAD;
    layout.element = BATON_ELEMENT_F32;
    if (is_source) {
        layout.kv_stride = head;
        layout.token_stride = 2 * head;
        layout.page_stride = PAGE_SOURCE * layout.token_stride;
        layout.layer_stride = PAGES * layout.page_stride;
    } else {
        layout.token_stride = head;
        layout.kv_stride = PAGE_DESTINATION * head;
        layout.layer_stride = 2 * layout.kv_stride;
        layout.page_stride = LAYERS * layout.layer_stride;
    }
    layout.head_stride = head;
    return layout;
}

/* The place of an element of the prompt. The prompt has pages 1, 2, 3 and so on. */
static float *place(char *base, const baton_layout *layout, unsigned token, unsigned layer,
                    unsigned kv, unsigned element)
{
    const uint64_t page = 1 + token / layout->page_size, within = token % layout->page_size;
    return (float *)(base + page * layout->page_stride + layer * layout->layer_stride +
                     kv * layout->kv_stride + within * layout->token_stride) + element;
}

static float value(unsigned token, unsigned layer, unsigned kv, unsigned element)
{
    return (float)(token * 1000 + layer * 100 + kv * 10 + element);
}

/* Writes the values of some tokens, or counts the wrong ones. */
static unsigned visit(char *base, const baton_layout *layout, unsigned from, unsigned to, int writes)
{
    unsigned wrong = 0;
    for (unsigned token = from; token < to; token++)
        for (unsigned rest = 0; rest < LAYERS * 2 * HEAD; rest++) {
            const unsigned layer = rest / (2 * HEAD), kv = rest / HEAD % 2, element = rest % HEAD;
            float *at = place(base, layout, token, layer, kv, element);
            if (writes)
                *at = value(token, layer, kv, element);
            else
                wrong += *at != value(token, layer, kv, element);
        }
    return wrong;
}

/* Waits for the end of the request. Returns 1 if its KV is handed over. */
static int await_end(uint64_t agent, uint8_t *payload)
{
    int landed = 0;
    for (;;) {
        baton_event event;
        CHECK(baton_wait(agent, 1000000));
        while (CHECK(baton_poll(agent, &event, 1)) == 1) {
            if (event.kind == BATON_EVENT_KIND_LANDED) {
                landed = 1;
                memcpy(payload, event.payload, BATON_PAYLOAD_BYTES);
            } else if (event.kind == BATON_EVENT_KIND_FAILED) {
                char cause[32];
                baton_cause_name(event.cause, cause, sizeof cause);
                fprintf(stderr, "the KV is not handed over: %s\n", cause);
            } else if (event.kind == BATON_EVENT_KIND_ENDED) {
                CHECK(baton_release(agent, event.request));
                return landed;
            }
        }
    }
}

int main(int argc, char **argv)
{
    const int is_source = argc == 2 && strcmp(argv[1], "source") == 0;
    if (!is_source && !(argc == 3 && strcmp(argv[1], "destination") == 0)) {
        fprintf(stderr, "usage: %s source | destination ADDRESS\n", argv[0]);
        return 2;
    }
    if (baton_abi() != BATON_ABI) {
        fprintf(stderr, "the library has interface %u, not %u\n", baton_abi(), BATON_ABI);
        return 1;
    }

    /* Memory for the KV, and an agent over it. */
    const baton_layout layout = layout_of(is_source);
    uint64_t region, agent, request;
    void *base;
    size_t bytes;
    CHECK(baton_region_new(PAGES * layout.page_size * LAYERS * 2 * HEAD * sizeof(float), &region));
    CHECK(baton_region_base(region, &base, &bytes));
    baton_config config;
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.role = is_source ? BATON_ROLE_SOURCE : BATON_ROLE_DESTINATION;
    config.region = region;
    config.layout = layout;
    memset(config.kind, 1, sizeof config.kind); /* a hash of the model, for example */
    CHECK(baton_agent_new(&config, &agent));

    uint32_t ids[TOKENS], pages[PAGES];
    for (uint32_t i = 0; i < TOKENS; i++)
        ids[i] = i;
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = 1 + i;
    uint8_t payload[BATON_PAYLOAD_BYTES];
    int landed;

    if (is_source) {
        char address[64];
        CHECK(baton_address(agent, address, sizeof address));
        puts(address);
        fflush(stdout);
        CHECK(baton_offer(agent, ROOM, ids, TOKENS, DEADLINE_MS, &request));
        /* The engine computes in chunks, and allocates pages for each. */
        unsigned leased = 0;
        for (unsigned from = 0; from < TOKENS; from += 32) {
            const unsigned to = from + 32 < TOKENS ? from + 32 : TOKENS;
            const unsigned wanted = (to + PAGE_SOURCE - 1) / PAGE_SOURCE;
            CHECK(baton_lease(agent, request, 0, pages + leased, wanted - leased));
            leased = wanted;
            visit(base, &layout, from, to, 1);
            CHECK(baton_compute(agent, request, to));
        }
        CHECK(baton_send_last(agent, request, (const uint8_t *)"first token: 42", 16));
        landed = await_end(agent, payload);
    } else {
        const uint32_t wanted = (TOKENS + PAGE_DESTINATION - 1) / PAGE_DESTINATION;
        CHECK(baton_wish(agent, ROOM, argv[2], ids, TOKENS, DEADLINE_MS, &request));
        CHECK(baton_lease(agent, request, 0, pages, wanted));
        landed = await_end(agent, payload);
        if (landed) {
            const unsigned wrong = visit(base, &layout, 0, TOKENS, 0);
            printf("%u wrong values; %s\n", wrong, (const char *)payload);
            landed = wrong == 0;
        }
    }
    baton_counter_values counters;
    counters.size = sizeof counters;
    CHECK(baton_counters(agent, &counters));
    fprintf(stderr, "requests: %u open, %llu landed, %llu failed\n", counters.open,
            (unsigned long long)counters.landed, (unsigned long long)counters.failed);
    CHECK(baton_agent_free(agent));
    CHECK(baton_region_free(region));
    return landed ? 0 : 1;
}
