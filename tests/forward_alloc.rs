//! After the load, a step with any batch allocates nothing.
#![allow(unsafe_code)]

#[path = "forward/model.rs"]
#[allow(dead_code)]
mod model;
#[path = "forward/run.rs"]
#[allow(dead_code)]
mod run;

use baton::kv::layout::KvDtype;
use baton::model::forward::batch::Logits;
use baton::model::forward::cpu::available_kernels;
use baton::model::tensor::TensorType;
use model::{Model, delta, gemma, hybrid, recurrent, small, sparse};
use run::{How, Runner};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// Counts allocations of all threads while it is armed.
struct Counting;

static ARMED: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ARMED.load(SeqCst) {
            COUNT.fetch_add(1, SeqCst);
        }
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    let mut sparse = sparse();
    sparse.experts.as_mut().unwrap().shared_intermediate = Some(96);
    for config in [small(), sparse, gemma(), recurrent(), hybrid(), delta()] {
        check(&Model::random(config, 1, |name| {
            match name.contains("down") || name.contains("mamba") || name.contains("linear_attn") {
                true => TensorType::F16,
                false => TensorType::Q8_0,
            }
        }));
    }
}

fn check(model: &Model) {
    for kernel in available_kernels() {
        let how = How {
            kernel: *kernel,
            threads: 3,
            page_size: 16,
            kv: KvDtype::F16,
            is_grouped: true,
            order: 1,
        };
        let mut runner = Runner::new(model, &how);
        let mut sequences: Vec<_> = (0..5).map(|i| runner.sequence(&[i; 400])).collect();
        // The first batch ever, a long one, decode rows, and a mix.
        for count in [1, 300, 1, 7] {
            sequences[0].done = 0;
            for (i, sequence) in sequences.iter_mut().enumerate() {
                let count = if i == 0 { count } else { 1 };
                runner.push(sequence, count, [Logits::Last, Logits::All, Logits::None][i % 3]);
            }
            COUNT.store(0, SeqCst);
            ARMED.store(true, SeqCst);
            let end = runner.step_only();
            ARMED.store(false, SeqCst);
            assert_eq!(COUNT.load(SeqCst), 0, "{kernel}, {count} tokens");
            assert_eq!(end, baton::model::forward::StepEnd::Complete);
            runner.batch.clear();
        }
    }
}
