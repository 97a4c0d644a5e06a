//! The flags about KV cache memory.

use super::value;
use crate::cli::flags::KvFlags;
use crate::config::KvConfig;
use crate::config::error::ConfigError;
use crate::config::values::ByteSize;
use crate::limits::{KV_MEMORY_MAX, KV_MEMORY_MIN};

/// Checks the sizes of the pool and of its pages.
pub fn read_kv(flags: &KvFlags) -> Result<KvConfig, ConfigError> {
    let page_size = flags.page_size;
    if !page_size.is_power_of_two() {
        return Err(value("--page-size", page_size, "must be a power of two"));
    }
    let memory = flags.kv_memory;
    if !(KV_MEMORY_MIN..=KV_MEMORY_MAX).contains(&memory.0) {
        let (least, most) = (ByteSize(KV_MEMORY_MIN), ByteSize(KV_MEMORY_MAX));
        let limit = format!("must be {least} to {most}; a number without a unit is bytes");
        return Err(value("--kv-memory", memory, limit));
    }
    Ok(KvConfig {
        page_size,
        memory,
        dtype: flags.kv_dtype,
        prefix_cache: !flags.disable_radix_cache,
        state_memory: state_memory(flags)?,
    })
}

/// The memory of checkpoints, which is a part of the pool.
fn state_memory(flags: &KvFlags) -> Result<Option<ByteSize>, ConfigError> {
    let Some(memory) = flags.state_memory else { return Ok(None) };
    if memory.0 > flags.kv_memory.0 {
        let limit = format!("must be at most --kv-memory, {}", flags.kv_memory);
        return Err(value("--state-memory", memory, limit));
    }
    if memory.0 > 0 && flags.disable_radix_cache {
        let limit = "must be 0 with --disable-radix-cache, which keeps no checkpoint";
        return Err(value("--state-memory", memory, limit));
    }
    Ok(Some(memory))
}
