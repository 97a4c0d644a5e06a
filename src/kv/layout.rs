//! Where K and V of a token lie: a layout described by strides, so that any engine's can be.
//!
//! Arithmetic only: no memory is touched here. Ours is page-major and head-major:
//! `[page][layer][K|V][kv_head][token][head_dim]`; others lay KV out layer by layer.

use crate::ids::PageId;

/// Element type of cached keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum KvDtype {
    /// 4 bytes, IEEE single.
    F32,
    /// 2 bytes, IEEE half.
    F16,
    /// 2 bytes, bfloat16.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
        }
    }

    /// The name used in flags, answers and messages.
    pub const fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
        }
    }
}

/// Key or value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyValue {
    /// Keys, after rotary embedding.
    Key,
    /// Values.
    Value,
}

/// Counts and strides (in bytes) of one rank's KV. Head elements are always contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvLayout {
    /// Tokens of a page.
    pub page_size: u32,
    /// Transformer layers.
    pub layers: u32,
    /// KV heads held by this rank.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Element type.
    pub dtype: KvDtype,
    /// From a page to the next.
    pub page_stride: u64,
    /// From a layer to the next.
    pub layer_stride: u64,
    /// From keys to values.
    pub kv_stride: u64,
    /// From a KV head to the next.
    pub head_stride: u64,
    /// From a token to the next.
    pub token_stride: u64,
}

impl KvLayout {
    /// Our own layout, `[page][layer][K|V][kv_head][token][head_dim]`: one contiguous block per page.
    pub const fn page_major(
        page_size: u32,
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        dtype: KvDtype,
    ) -> KvLayout {
        let token_stride = head_dim as u64 * dtype.bytes();
        let head_stride = token_stride * page_size as u64;
        let kv_stride = head_stride * kv_heads as u64;
        let layer_stride = kv_stride * 2;
        let page_stride = layer_stride * layers as u64;
        KvLayout {
            page_size,
            layers,
            kv_heads,
            head_dim,
            dtype,
            page_stride,
            layer_stride,
            kv_stride,
            head_stride,
            token_stride,
        }
    }

    /// A layout as other engines keep it, `[layer][K|V][page][token][kv_head][head_dim]`: a block per page, layer,
    /// and K or V, for a pool of `pages` pages.
    pub const fn layer_major(
        page_size: u32,
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        dtype: KvDtype,
        pages: u32,
    ) -> KvLayout {
        let head_stride = head_dim as u64 * dtype.bytes();
        let token_stride = head_stride * kv_heads as u64;
        let page_stride = token_stride * page_size as u64;
        let kv_stride = page_stride * pages as u64;
        let layer_stride = kv_stride * 2;
        KvLayout {
            page_size,
            layers,
            kv_heads,
            head_dim,
            dtype,
            page_stride,
            layer_stride,
            kv_stride,
            head_stride,
            token_stride,
        }
    }

    /// Byte offset of the first element of one token's head inside the region.
    #[inline]
    pub const fn offset(&self, page: PageId, layer: u32, which: KeyValue, head: u32, token: u32) -> u64 {
        let kv = match which {
            KeyValue::Key => 0,
            KeyValue::Value => self.kv_stride,
        };
        page.0 as u64 * self.page_stride
            + layer as u64 * self.layer_stride
            + kv
            + head as u64 * self.head_stride
            + token as u64 * self.token_stride
    }

    /// Bytes of KV in one page, over all layers.
    pub const fn page_bytes(&self) -> u64 {
        self.page_size as u64 * self.token_bytes()
    }

    /// Bytes of KV of one token, over all layers.
    pub const fn token_bytes(&self) -> u64 {
        self.layers as u64 * 2 * self.kv_heads as u64 * self.head_dim as u64 * self.dtype.bytes()
    }

    /// Pages that hold `tokens` tokens.
    pub const fn pages_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_size)
    }
}
