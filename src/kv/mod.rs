//! KV memory. [`layout`] gives the position of each token's keys and values, and [`groups`] says
//! which layers share a page. [`state_layout`] gives the position of state that belongs to a whole
//! sequence. [`region`] is the mapping that holds both. [`pool`] and [`lease`] record the holders
//! of each page. [`page_key`] names the content of pages, and `prefix` finds it. [`request_pages`]
//! lists the pages of a request, and [`window`] says which ones it needs. [`tier`] keeps the KV of
//! requests that wait for pages.

mod adopted_memory;
mod bits;
pub mod groups;
pub mod layout;
pub mod lease;
mod memory_file;
pub(in crate::kv) mod page_cache;
pub mod page_key;
pub mod page_span;
pub mod pool;
mod prefix;
pub mod region;
pub mod request_pages;
pub mod state_layout;
pub mod tier;
pub mod window;
