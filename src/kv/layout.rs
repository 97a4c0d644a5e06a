//! Positions of a token's K and V in memory, described by strides, so that any engine's layout
//! fits.
//!
//! Arithmetic only: no memory is touched here. Baton's own layout is page-major and head-major:
//! `[page][layer][K|V][kv_head][token][head_dim]`; other engines store KV layer by layer. A worker
//! of several tensor-parallel ranks has one region per rank, one behind the other. All have the
//! same layout and share page ids. MLA keeps one latent vector instead of heads; the layout
//! describes it as one KV head that every rank holds. For state without keys and values
//! ([`KvLayout::state_slots`]), the first half of each head stands for keys.

use crate::ids::PageId;
use std::ops::Range;

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

/// Counts and strides (in bytes) of a worker's KV, within one rank and from rank to rank. The
/// elements of a head are always contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvLayout {
    /// Tokens of a page.
    pub page_size: u32,
    /// Transformer layers.
    pub layers: u32,
    /// KV heads held by each rank.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Element type.
    pub dtype: KvDtype,
    /// Bytes from a page to the next.
    pub page_stride: u64,
    /// Bytes from a layer to the next.
    pub layer_stride: u64,
    /// Bytes from keys to values.
    pub kv_stride: u64,
    /// Bytes from a KV head to the next.
    pub head_stride: u64,
    /// Bytes from a token to the next.
    pub token_stride: u64,
    /// Tensor-parallel ranks.
    pub ranks: u32,
    /// Bytes from a rank's region to the next.
    pub rank_stride: u64,
    /// KV heads of the model; each rank holds its share.
    pub model_kv_heads: u32,
}

impl KvLayout {
    /// Baton's own layout, `[page][layer][K|V][kv_head][token][head_dim]`: one contiguous block per
    /// page. One rank, which holds all heads.
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
            ranks: 1,
            rank_stride: 0,
            model_kv_heads: kv_heads,
        }
    }

    /// The layout of other engines, `[layer][K|V][page][token][kv_head][head_dim]`: a block per
    /// page, layer, and K or V, for a pool of `pages` pages. One rank, which holds all heads.
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
            ranks: 1,
            rank_stride: 0,
            model_kv_heads: kv_heads,
        }
    }

    /// A pool of state slots, `[slot][layer][head][element]`: one record per request, for models
    /// that do not keep their state token by token ([`super::state_layout`]). A slot is a page of
    /// one token; `elements` counts one head's elements in one layer. One rank, which holds all
    /// heads. None if `elements` is odd, because a head is then not two halves.
    pub const fn state_slots(
        layers: u32,
        heads: u32,
        elements: u32,
        dtype: KvDtype,
    ) -> Option<KvLayout> {
        if !elements.is_multiple_of(2) {
            return None;
        }
        let head_stride = elements as u64 * dtype.bytes();
        let layer_stride = head_stride * heads as u64;
        Some(KvLayout {
            page_size: 1,
            layers,
            kv_heads: heads,
            head_dim: elements / 2,
            dtype,
            page_stride: layer_stride * layers as u64,
            layer_stride,
            kv_stride: head_stride / 2,
            head_stride,
            token_stride: layer_stride,
            ranks: 1,
            rank_stride: 0,
            model_kv_heads: heads,
        })
    }

    /// KV heads that each of `ranks` ranks holds of a model with `kv_heads`. With more ranks than
    /// heads it is 1, and neighbouring ranks hold the same head. None if the division leaves a
    /// remainder.
    pub const fn heads_per_rank(kv_heads: u32, ranks: u32) -> Option<u32> {
        if kv_heads == 0 || ranks == 0 {
            None
        } else if kv_heads.is_multiple_of(ranks) {
            Some(kv_heads / ranks)
        } else if ranks.is_multiple_of(kv_heads) {
            Some(1)
        } else {
            None
        }
    }

    /// This one-rank layout for each of `ranks` ranks of a model with `model_kv_heads`. The regions
    /// begin `rank_stride` bytes apart. None if this layout does not hold
    /// [`KvLayout::heads_per_rank`] heads.
    pub const fn on_ranks(
        self,
        ranks: u32,
        rank_stride: u64,
        model_kv_heads: u32,
    ) -> Option<KvLayout> {
        match KvLayout::heads_per_rank(model_kv_heads, ranks) {
            Some(heads) if heads == self.kv_heads => {
                Some(KvLayout { ranks, rank_stride, model_kv_heads, ..self })
            }
            _ => None,
        }
    }

    /// Ranks that hold the same heads.
    const fn replicas(&self) -> u32 {
        let replicas = self.ranks / self.model_kv_heads;
        if replicas == 0 { 1 } else { replicas }
    }

    /// The model's KV heads that a rank holds.
    pub const fn heads_of(&self, rank: u32) -> Range<u32> {
        let first = rank / self.replicas() * self.kv_heads;
        first..first + self.kv_heads
    }

    /// The lowest rank that holds head `model_head` of the model.
    pub const fn holder(&self, model_head: u32) -> u32 {
        model_head / self.kv_heads * self.replicas()
    }

    /// Byte offset of the first element of one token's head inside the region of rank 0. The region
    /// of each further rank begins [`KvLayout::rank_stride`] bytes later. `head` counts the rank's
    /// own heads.
    #[inline]
    pub const fn offset(
        &self,
        page: PageId,
        layer: u32,
        which: KeyValue,
        head: u32,
        token: u32,
    ) -> u64 {
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

    /// Bytes of KV in one page of a rank, over all layers.
    pub const fn page_bytes(&self) -> u64 {
        self.page_size as u64 * self.token_bytes()
    }

    /// Bytes of KV of one token on a rank, over all layers.
    pub const fn token_bytes(&self) -> u64 {
        self.layers as u64 * 2 * self.kv_heads as u64 * self.head_dim as u64 * self.dtype.bytes()
    }

    /// Pages that hold `tokens` tokens.
    pub const fn pages_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_head_is_held_and_its_holder_is_the_lowest() {
        for (kv_heads, ranks) in [(8, 1), (8, 2), (8, 8), (3, 3), (2, 8), (1, 4), (3, 6)] {
            let held = KvLayout::heads_per_rank(kv_heads, ranks).unwrap();
            let layout = KvLayout::page_major(16, 2, held, 4, KvDtype::F16);
            let layout = layout.on_ranks(ranks, 1 << 20, kv_heads).unwrap();
            for head in 0..kv_heads {
                let holders: Vec<u32> =
                    (0..ranks).filter(|&rank| layout.heads_of(rank).contains(&head)).collect();
                assert_eq!(
                    holders.len() as u32,
                    (ranks / kv_heads).max(1),
                    "{kv_heads} heads on {ranks}"
                );
                assert_eq!(layout.holder(head), holders[0], "{kv_heads} heads on {ranks}");
            }
        }
        for (kv_heads, ranks) in [(8, 3), (3, 2), (4, 6), (0, 1), (1, 0)] {
            assert_eq!(KvLayout::heads_per_rank(kv_heads, ranks), None);
        }
        let whole = KvLayout::page_major(16, 2, 8, 4, KvDtype::F16);
        assert_eq!(whole.on_ranks(2, 0, 8), None, "a rank of two holds half of the heads");
    }
}
