//! Compares two workers before a hand-off (model, layouts, records), and makes their plan.

use crate::kv::groups::GroupCounts;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::sys::host;
use crate::transfer::aux::{AUX_VERSION, AuxRecord};
use crate::transfer::plan::Template;
use crate::wire::message::{
    Announce, AuxLayoutClaim, BitClass, Fingerprint, HostId, KvLayoutClaim, Rank, Refusal,
    RegionLengths, Welcome,
};

/// Field named when a worker has several processes.
const PROCESSES: &str = "processes of a worker";

/// This worker's half of the comparison.
#[derive(Clone, Debug)]
pub struct WorkerIdentity {
    /// Model, weights, kernels, tokenizer, template.
    pub fingerprint: Fingerprint,
    /// The class of its kernels.
    pub bit_class: BitClass,
    /// KV layout.
    pub layout: KvLayout,
    /// The groups of layers, each with pages of its own. They follow from the model.
    pub groups: GroupCounts,
    /// Pages of the pool.
    pub pages: u32,
    /// Bytes of the pool's region.
    pub pool_bytes: u64,
    /// Slots of the status table.
    pub slots: u32,
    /// The host: shm works only within it.
    pub host: HostId,
}

/// The reason why two workers are not compatible: the field and both values. Both sides get it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The kind of reason.
    pub reason: Refusal,
    /// The field that differs.
    pub field: String,
    /// The source's value.
    pub source: String,
    /// The destination's value.
    pub destination: String,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch { field, source, destination, .. } = self;
        write!(f, "{field} differs: source has {source}, destination has {destination}")?;
        if field == BitClass::FIELD { write!(f, "; {}", BitClass::REMEDY) } else { Ok(()) }
    }
}

impl WorkerIdentity {
    /// The layout as sent on the wire.
    pub fn kv_claim(&self) -> KvLayoutClaim {
        let layout = &self.layout;
        KvLayoutClaim {
            page_size: layout.page_size,
            layers: layout.layers,
            kv_heads: layout.kv_heads,
            head_dim: layout.head_dim,
            pages: self.pages,
            dtype: layout.dtype as u32,
            page_stride: layout.page_stride,
            layer_stride: layout.layer_stride,
            kv_stride: layout.kv_stride,
            head_stride: layout.head_stride,
            token_stride: layout.token_stride,
            rank_stride: layout.rank_stride,
            ranks: layout.ranks,
            model_kv_heads: layout.model_kv_heads,
        }
    }

    /// The aux layout as sent on the wire.
    pub fn aux_claim(&self) -> AuxLayoutClaim {
        AuxLayoutClaim {
            version: AUX_VERSION,
            record_bytes: size_of::<AuxRecord>() as u32,
            slots: self.slots,
        }
    }

    /// The regions as sent on the wire.
    pub fn regions(&self) -> RegionLengths {
        RegionLengths { kv: self.pool_bytes, aux: 0, notice: 0 }
    }

    /// Compares a destination's Announce with this source. Returns the destination's layout and the
    /// plan.
    pub fn accept(&self, announce: &Announce) -> Result<(KvLayout, Template), Mismatch> {
        let (ours, theirs) = (&self.bit_class, &announce.bit_class);
        let are_known = ours.is_known() && theirs.is_known();
        // A peer of an earlier minor version sends no class. Then the families must be equal.
        let kernels =
            if are_known { self.fingerprint.kernels } else { announce.fingerprint.kernels };
        let fingerprint = Fingerprint { kernels, ..announce.fingerprint };
        if let Some((field, ours, theirs)) = self.fingerprint.difference(&fingerprint) {
            return Err(differ(Refusal::Model, field, &short(ours), &short(theirs)));
        }
        if are_known && ours != theirs {
            let (ours, theirs) = (ours.to_string(), theirs.to_string());
            return Err(differ(Refusal::Model, BitClass::FIELD, &ours, &theirs));
        }
        let (ours, theirs) = (self.aux_claim(), announce.aux);
        for (field, ours, theirs) in [
            ("aux version", ours.version, theirs.version),
            ("aux record bytes", ours.record_bytes, theirs.record_bytes),
        ] {
            if ours != theirs {
                return Err(differ(
                    Refusal::AuxLayout,
                    field,
                    &ours.to_string(),
                    &theirs.to_string(),
                ));
            }
        }
        let one = "1".to_string();
        let pool = only(&announce.ranks)
            .map_err(|many| differ(Refusal::KvLayout, PROCESSES, &one, &many.to_string()))?;
        let destination = layout_of_claim(&announce.kv, pool).ok_or_else(|| {
            differ(
                Refusal::KvLayout,
                "KV layout",
                "a checked one",
                "outside its region, or heads that ranks cannot share",
            )
        })?;
        let template = self.plan(&self.layout, &destination)?;
        Ok((destination, template))
    }

    /// The layout of a source, from its Welcome, and the plan from it to this destination.
    pub fn plan_from(&self, welcome: &Welcome) -> Result<(KvLayout, Template), Mismatch> {
        let one = "1".to_string();
        let pool = only(&welcome.ranks)
            .map_err(|many| differ(Refusal::KvLayout, PROCESSES, &many.to_string(), &one))?;
        let layout = layout_of_claim(&welcome.kv, pool).ok_or_else(|| {
            differ(
                Refusal::KvLayout,
                "KV layout",
                "outside its region, or heads that ranks cannot share",
                "a checked one",
            )
        })?;
        let template = self.plan(&layout, &self.layout)?;
        Ok((layout, template))
    }

    fn plan(&self, source: &KvLayout, destination: &KvLayout) -> Result<Template, Mismatch> {
        // The pages of several groups are in one list, so both sides count them alike.
        if !self.groups.is_single() && source.page_size != destination.page_size {
            let [ours, theirs] = [source, destination].map(|layout| layout.page_size.to_string());
            return Err(differ(Refusal::KvLayout, "page size", &ours, &theirs));
        }
        Template::new(source, destination).map_err(|error| {
            differ(Refusal::KvLayout, error.field, &error.source, &error.destination)
        })
    }
}

/// Bytes of the pool of a worker's only process. Ranks of one process share one memory. Workers
/// with several processes are not supported.
fn only(processes: &[Rank]) -> Result<u64, usize> {
    match processes {
        [one] => Ok(one.regions.kv),
        several => Err(several.len()),
    }
}

/// The layout that a peer announced, after two checks. Its last byte lies inside the announced
/// region, and each rank holds its share of the heads.
pub fn layout_of_claim(claim: &KvLayoutClaim, pool_bytes: u64) -> Option<KvLayout> {
    let dtype = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16]
        .into_iter()
        .find(|&dtype| dtype as u32 == claim.dtype)?;
    if claim.extent(dtype.bytes())? > pool_bytes {
        return None;
    }
    let rank = KvLayout {
        page_size: claim.page_size,
        layers: claim.layers,
        kv_heads: claim.kv_heads,
        head_dim: claim.head_dim,
        dtype,
        page_stride: claim.page_stride,
        layer_stride: claim.layer_stride,
        kv_stride: claim.kv_stride,
        head_stride: claim.head_stride,
        token_stride: claim.token_stride,
        ranks: 1,
        rank_stride: 0,
        model_kv_heads: claim.kv_heads,
    };
    rank.on_ranks(claim.ranks, claim.rank_stride, claim.model_kv_heads)
}

fn differ(reason: Refusal, field: &str, source: &str, destination: &str) -> Mismatch {
    Mismatch { reason, field: field.into(), source: source.into(), destination: destination.into() }
}

/// The first bytes of a hash, enough to show that two hashes differ.
fn short(hash: &[u8; 32]) -> String {
    hash[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The id of this host: equal in all processes that can share memory with this one.
pub fn host_id() -> HostId {
    HostId(host::id())
}
