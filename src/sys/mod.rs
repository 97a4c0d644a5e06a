//! Small safe wrappers around kernel features that the standard library lacks, and the access to
//! files that the simulator replaces.

pub mod affinity;
pub mod call_counter;
pub mod clock;
pub mod event;
pub mod file_access;
pub mod files;
pub mod fork_mark;
pub mod heap;
pub mod host;
pub mod last_resort;
pub mod names;
pub mod signal_mask;
pub mod stream;
pub mod topology;
pub mod verbs;
