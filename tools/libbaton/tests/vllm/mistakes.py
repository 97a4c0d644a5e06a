"""Plants mistakes in the connector, one at a time. The model must find each of them.

First it runs without a mistake, and must find nothing: a slow machine could look like a mistake.

    BATON_LIBRARY=... PYTHONPATH=tools/libbaton/python python mistakes.py [NAME]...
"""

import contextlib
import logging
import sys
import time
from unittest import mock

import model
import orders

from baton_kv import _vllm_scheduler, _vllm_worker
from baton_kv._vllm_scheduler import SchedulerSide
from baton_kv._vllm_worker import WorkerSide

EXAMPLES = 150
MISTAKES = {}


def mistake(owner, name):
    """Adds a mistake: `function` gets the right method first, then its arguments."""
    def add(function):
        right = getattr(owner, name)
        wrong = lambda *given, **named: function(right, *given, **named)
        MISTAKES[function.__name__] = lambda: mock.patch.object(owner, name, wrong)
        return function
    return add


@mistake(WorkerSide, "get_transfer_results")
def a_load_is_reported_twice(right, worker, ids):
    results = right(worker, ids)
    worker._ended |= results.finished_recving
    return results


@mistake(WorkerSide, "_take_end")
def an_abandoned_load_is_not_reported(right, worker, one):
    if not one.is_cancelled:
        right(worker, one)


@mistake(WorkerSide, "_end_load")
def a_failed_load_is_reported_as_good(right, worker, request_id, cause):
    right(worker, request_id, None)


@mistake(WorkerSide, "_take")
def a_load_is_reported_before_its_end(right, worker, one, event):
    right(worker, one, event)
    if one.kind == "load" and event.kind.name == "MET":
        worker._ended.add(one.request_id)


@mistake(WorkerSide, "handle_preemptions")
def offers_of_preempted_requests_stay(right, worker, metadata):
    metadata.preempted = []
    right(worker, metadata)


@mistake(SchedulerSide, "build_connector_meta")
def a_resumed_request_keeps_its_room(right, scheduler, output):
    kept = {one: scheduler._prompts[one].room for one in output.preempted_req_ids or ()
            if one in scheduler._prompts}
    metadata = right(scheduler, output)
    for request_id, room in kept.items():
        scheduler._prompts[request_id].room = room
    return metadata


@mistake(_vllm_scheduler, "digests_of")
def any_prompt_has_the_same_digests(right, request, block_size):
    return [7] * len(right(request, block_size))


@mistake(_vllm_scheduler, "digests_of")
def the_last_partial_block_is_not_in_the_digests(right, request, block_size):
    digests = right(request, block_size)
    return digests[:-1] + [7] if len(request.prompt_token_ids) % block_size else digests


@mistake(SchedulerSide, "update_state_after_alloc")
def a_load_leaves_its_first_block_out(right, scheduler, request, blocks, num_external):
    right(scheduler, request, blocks, num_external)
    for load in scheduler._next.loads:
        load.prefix = min(load.prefix + 1, len(load.blocks) - 1)


@mistake(SchedulerSide, "on_new_request")
def a_room_can_be_loaded_by_two(right, scheduler, request):
    scheduler._rooms.clear()
    right(scheduler, request)


@mistake(SchedulerSide, "request_finished")
def a_finished_request_keeps_its_room(right, scheduler, request, blocks):
    rooms = set(scheduler._rooms)
    answer = right(scheduler, request, blocks)
    scheduler._rooms |= rooms
    return answer


@mistake(SchedulerSide, "request_finished")
def decode_keeps_its_blocks(right, scheduler, request, blocks):
    is_fetch = request.request_id in scheduler._fetches
    stays, params = right(scheduler, request, blocks)
    return stays or is_fetch, params


@mistake(SchedulerSide, "request_finished")
def prefill_frees_its_blocks_at_once(right, scheduler, request, blocks):
    return False, right(scheduler, request, blocks)[1]


@mistake(WorkerSide, "get_transfer_results")
def prefill_frees_its_blocks_before_the_end(right, worker, ids):
    results = right(worker, ids)
    results.finished_sending |= set(worker._kept)
    worker._kept.clear()
    return results


@mistake(WorkerSide, "_hand_over")
def the_last_tokens_never_leave(right, worker, save):
    save.is_complete = False
    right(worker, save)


@mistake(WorkerSide, "_hand_over")
def a_prompt_is_offered_in_the_wrong_order(right, worker, save):
    save.blocks.reverse()
    right(worker, save)


@mistake(SchedulerSide, "update_state_after_alloc")
def a_failed_load_is_tried_again(right, scheduler, request, blocks, num_external):
    right(scheduler, request, blocks, num_external)
    if request.request_id in scheduler._fetches:
        scheduler._fetches[request.request_id].has_begun = False


@mistake(WorkerSide, "_cancel")
def offers_are_never_cancelled(right, worker, one):
    if one is None or one.kind != "offer":
        right(worker, one)


@mistake(WorkerSide, "_hand_over")
def the_first_blocks_are_offered_last(right, worker, save):
    if save.digests is not None and len(save.blocks) > 2:
        save.blocks = save.blocks[2:] + save.blocks[:2]
    right(worker, save)


def is_found(plant):
    """The words of the first failure, or nothing."""
    model.FAILURES.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(plant())
        # Random runs seldom have two prompts that differ in their last block alone.
        try:
            orders.load_another_prompt()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:80]
        # hypothesis raises something of its own when a failure does not come again.
        with contextlib.suppress(Exception, BaseExceptionGroup):
            model.run(EXAMPLES, report_multiple_bugs=False)
    return model.FAILURES[0][:80] if model.FAILURES else ""


def main():
    logging.disable(logging.CRITICAL)
    model.DRAIN, _vllm_worker.PREEMPTION_SECONDS = 12.0, 2.0
    names, missed = sys.argv[1:] or list(MISTAKES), []
    words = is_found(contextlib.nullcontext)
    if words:
        print(f"without a mistake: {words}")
        return True
    for name in names:
        began = time.monotonic()
        words = is_found(MISTAKES[name])
        seconds = time.monotonic() - began
        print(f"{'found ' if words else 'MISSED'} {seconds:4.0f} s  {name}: {words}", flush=True)
        missed += [] if words else [name]
    print(f"{len(names) - len(missed)} of {len(names)} mistakes are found")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
