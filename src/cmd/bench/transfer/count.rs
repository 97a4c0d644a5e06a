//! What hand-offs take from their process beside time: system calls and allocations.
//!
//! Invariants: a count is of all threads of the process. A count that this build or this host does
//! not have is missing, not zero.

use crate::stdx::seal::allocations;
use crate::sys::call_counter::CallCounter;
use crate::transfer::thread_names::moves_bytes;
use serde::{Deserialize, Serialize};

/// System calls by kind of thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CallCounts {
    /// Those of the threads that move bytes. They do the same work in both ways. Before they park,
    /// they look for work some hundred times, and over tcp each look is a system call.
    pub data: u64,
    /// Those of the engine and of `ctl`.
    pub control: u64,
}

/// Counts of one process, or of both.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BenchCounts {
    /// System calls, or the reason why there is no count.
    pub system_calls: Result<CallCounts, String>,
    /// Allocations of memory. Only a debug build counts them.
    pub allocations: Option<u64>,
}

impl BenchCounts {
    /// The counts of both processes.
    pub fn and(self, theirs: BenchCounts) -> BenchCounts {
        let both = |ours: CallCounts, theirs: CallCounts| CallCounts {
            data: ours.data.saturating_add(theirs.data),
            control: ours.control.saturating_add(theirs.control),
        };
        let system_calls = self.system_calls.and_then(|ours| Ok(both(ours, theirs.system_calls?)));
        let allocations = self.allocations.zip(theirs.allocations);
        BenchCounts { system_calls, allocations: allocations.map(|(a, b)| a.saturating_add(b)) }
    }
}

/// Counts that have begun.
#[derive(Debug)]
pub struct CountStart {
    system_calls: Result<CallCounter, String>,
    allocations: Option<u64>,
}

impl CountStart {
    /// Begins to count.
    pub fn now() -> CountStart {
        let system_calls = CallCounter::start().map_err(|why| why.to_string());
        CountStart { system_calls, allocations: allocations() }
    }

    /// The counts since the start.
    pub fn finish(self) -> BenchCounts {
        let allocations = allocations().zip(self.allocations).map(|(now, before)| now - before);
        let finish = |calls: CallCounter| calls.finish().map_err(|why| why.to_string());
        BenchCounts { system_calls: self.system_calls.and_then(finish).map(sum), allocations }
    }
}

fn sum(threads: Vec<(String, u64)>) -> CallCounts {
    let mut counts = CallCounts::default();
    for (name, calls) in threads {
        *(if moves_bytes(&name) { &mut counts.data } else { &mut counts.control }) += calls;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_one_process_is_no_count_of_both() {
        let counts = |system_calls, allocations| BenchCounts { system_calls, allocations };
        let named = |name: &str, calls| (name.to_owned(), calls);
        let ours = sum(vec![named("move-0", 3), named("baton-ctl", 2), named("baton", 1)]);
        assert_eq!(ours, CallCounts { data: 3, control: 3 });
        let ours = counts(Ok(ours), Some(2));
        let both = counts(Ok(CallCounts { data: 6, control: 6 }), Some(4));
        assert_eq!(ours.clone().and(ours.clone()), both);
        let missing = counts(Err("no".into()), None);
        assert_eq!(ours.clone().and(missing.clone()), missing);
        assert_eq!(missing.clone().and(ours), missing);
    }
}
