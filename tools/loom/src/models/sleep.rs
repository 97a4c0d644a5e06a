//! The sleep of a listener: it stands for a mover's eventfd or the engine's parking token. If a
//! listener is woken while it is awake, its next sleep ends at once.

use loom::sync::{Arc, Condvar, Mutex};

/// The sleep of one listener. A clone wakes the same listener.
#[derive(Clone)]
pub struct Sleep(Arc<(Mutex<bool>, Condvar)>);

impl Sleep {
    pub fn new() -> Sleep {
        Sleep(Arc::new((Mutex::new(false), Condvar::new())))
    }

    /// Sleeps until it is woken. Unlike the product it has no time limit, so that a lost wake-up
    /// shows.
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
