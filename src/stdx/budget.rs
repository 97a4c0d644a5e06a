//! Memory that several owners share, in bytes. Any thread can take a share and give it back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes that are left.
#[derive(Clone, Debug)]
pub struct Budget(Arc<AtomicUsize>);

/// Bytes of a [`Budget`]. They go back when the share is dropped.
#[derive(Debug)]
pub struct BudgetShare {
    bytes: usize,
    left: Arc<AtomicUsize>,
}

impl Budget {
    /// A budget of `bytes`.
    pub fn new(bytes: usize) -> Budget {
        Budget(Arc::new(AtomicUsize::new(bytes)))
    }

    /// Takes `bytes`, if so many are left.
    pub fn take(&self, bytes: usize) -> Option<BudgetShare> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        taken.ok().map(|_| BudgetShare { bytes, left: self.0.clone() })
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_comes_back() {
        let budget = Budget::new(10);
        let first = budget.take(7).unwrap();
        assert!(budget.take(4).is_none());
        assert!(budget.take(3).is_some());
        drop(first);
        assert!(budget.take(10).is_some());
    }
}
