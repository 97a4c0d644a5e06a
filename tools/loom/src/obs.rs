//! In the place of the product's log: what a thread logs it says to whoever finds the model failing.

pub mod log {
    macro_rules! event {
        ($level:ident, $component:expr, $message:literal) => {
            eprintln!("{}: {}", $component, $message)
        };
    }
    pub(crate) use event;
}
