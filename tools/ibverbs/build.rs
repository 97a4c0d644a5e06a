//! Generates the code that compares Baton's bindings with those of the crate: a line for each size,
//! offset and number of Baton's bindings.

#[path = "../../src/sys/verbs/abi.rs"]
#[allow(dead_code)]
mod abi;

use abi::{HEADS, NUMBERS, STRUCTS};
use std::fmt::Write as _;
use std::{env, fs, path::Path};

/// The crate has this struct in hand-written form, with private fields.
const BY_HAND: &str = "struct ibv_wc";

/// The crate's path of a field in C.
fn path(structure: &str, field: &str) -> String {
    match (structure, field) {
        ("struct ibv_send_wr", "imm_data") => "__bindgen_anon_1.imm_data".into(),
        ("struct ibv_send_wr", "bind_mw.mw") => "__bindgen_anon_2.bind_mw.mw".into(),
        // A keyword of Rust.
        (_, "type") => "type_".into(),
        _ => field.into(),
    }
}

/// The crate's expression for a number in C.
fn number(name: &str) -> String {
    let modules = [
        ("IBV_PORT_", "ibv_port_state::", ""),
        ("IBV_ACCESS_", "ibv_access_flags::", ".0"),
        ("IBV_QPT_", "ibv_qp_type::", ""),
        ("IBV_QPS_", "ibv_qp_state::", ""),
        ("IBV_QP_", "ibv_qp_attr_mask::", ".0"),
        ("IBV_SEND_", "ibv_send_flags::", ".0"),
        ("IBV_WR_", "ibv_wr_opcode::", ""),
        ("IBV_WC_WITH_IMM", "ibv_wc_flags::", ".0"),
        ("IBV_WC_RDMA_WRITE", "ibv_wc_opcode::", ""),
        ("IBV_WC_RECV_RDMA_WITH_IMM", "ibv_wc_opcode::", ""),
        ("IBV_WC_", "ibv_wc_status::", ""),
    ];
    let found = modules.iter().find(|(prefix, ..)| name.starts_with(prefix));
    found.map_or(name.to_string(), |(_, module, field)| format!("{module}{name}{field}"))
}

fn main() {
    println!("cargo:rerun-if-changed=../../src/sys/verbs/abi.rs");
    let mut lines = String::from("[\n");
    for (index, layout) in
        STRUCTS.iter().chain(HEADS).enumerate().filter(|(_, layout)| layout.name != BY_HAND)
    {
        let (name, theirs) = (layout.name, layout.name.split(' ').next_back().expect("a word"));
        if index < STRUCTS.len() {
            let _ = writeln!(lines, "(\"{name}\", {}, size_of::<{theirs}>()),", layout.size);
        }
        for (field, offset) in layout.fields {
            let path = path(name, field);
            let _ = writeln!(
                lines,
                "(\"{name}.{field}\", {offset}, std::mem::offset_of!({theirs}, {path})),"
            );
        }
    }
    for (name, value) in NUMBERS {
        let _ = writeln!(lines, "(\"{name}\", {value}, {} as usize),", number(name));
    }
    lines.push(']');
    let out = env::var("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("compared.rs"), lines).expect("a file can be written");
}
