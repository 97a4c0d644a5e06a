//! The engine's thread neither allocates nor frees after its start.

#[allow(dead_code)]
mod support;

use baton::model::sampler::SamplingParams;
use baton::stdx::seal::{SealingAllocator, seal_thread, violations};
use support::rig::{Rig, Setup, Wanted};

#[global_allocator]
static ALLOCATOR: SealingAllocator = SealingAllocator;

/// One test, as the count is the process's.
#[test]
fn a_full_life_of_requests_allocates_nothing_on_the_engine_thread() {
    for split in [true, false] {
        let mut setup = Setup::new();
        setup.config.max_running = 3;
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let mut ids = Vec::new();
        for i in 0..60 {
            let mut wanted = Wanted::new(3 + i % 50, 1 + i % 17);
            wanted.top_logprobs = 20;
            wanted.sampling = SamplingParams {
                temperature: 0.8,
                top_p: 0.9,
                top_k: 12,
                min_p: 0.01,
                presence_penalty: 0.2,
                frequency_penalty: 0.2,
                repetition_penalty: 1.1,
                seed: i.into(),
            };
            while !rig.has_slots() {
                rig.turn();
            }
            let legs = rig.submit(&wanted);
            ids.push(legs.decode);
            (0..i % 4).for_each(|_| _ = rig.turn());
            if i % 7 == 0 {
                rig.abort(ids[ids.len() / 2]);
                rig.abort(legs.decode);
            }
        }
        rig.finish();
    }
    assert_eq!(violations(), 0);

    let seal = seal_thread();
    let allocated = vec![1u8];
    drop(seal);
    assert_eq!(violations(), 1, "the allocator does not watch");
    drop(allocated);
}
