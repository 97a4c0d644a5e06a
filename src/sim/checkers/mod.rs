//! What must hold, whatever happens: one file each, fed by the cluster, each of which answers with what is wrong.

pub mod ends;
pub mod idle;
pub mod pages;
pub mod shadow;
pub mod tokens;
