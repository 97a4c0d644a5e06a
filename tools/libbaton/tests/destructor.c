/* A destructor of thread-local data calls the library after the library's own data is gone. */
#include "baton.h"

#include <pthread.h>
#include <string.h>

static pthread_key_t key;
static int in_thread, in_destructor;
static size_t text_bytes = 1;

static void destroy(void *data)
{
    char text[64] = "x";
    (void)data;
    in_destructor = baton_release(12345, 1);
    text_bytes = baton_last_error(text, sizeof text) + strlen(text);
}

static void *run(void *data)
{
    pthread_setspecific(key, &key);
    in_thread = baton_release(12345, 1);
    return data;
}

int main(void)
{
    pthread_t thread;
    pthread_key_create(&key, destroy);
    pthread_create(&thread, NULL, run, NULL);
    pthread_join(thread, NULL);
    if (in_thread != BATON_ERROR_HANDLE || in_destructor != BATON_ERROR_HANDLE)
        return 1;
    return text_bytes == 0 ? 0 : 2;
}
