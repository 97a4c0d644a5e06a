//! Where a listener sleeps: an eventfd to a mover, a parking token to the engine. Waking somebody who is awake
//! makes the next sleep short.

use loom::sync::{Arc, Condvar, Mutex};

/// Of one listener; a clone wakes the same.
#[derive(Clone)]
pub struct Sleep(Arc<(Mutex<bool>, Condvar)>);

impl Sleep {
    pub fn new() -> Sleep {
        Sleep(Arc::new((Mutex::new(false), Condvar::new())))
    }

    /// Until somebody wakes us: without the product's bound in time, so that a lost wake-up shows.
    pub fn sleep(&self) {
        let mut woken = self.0.0.lock().unwrap();
        while !*woken {
            woken = self.0.1.wait(woken).unwrap();
        }
        *woken = false;
    }

    pub fn wake(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_one();
    }
}
