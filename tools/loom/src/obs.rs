//! Replaces the product's log: events go to standard error, to explain a model that fails.

pub mod log {
    macro_rules! event {
        ($level:ident, $component:expr, $message:literal) => {
            eprintln!("{}: {}", $component, $message)
        };
    }
    pub(crate) use event;
}
