//! The binary needs no shared libraries except the system's libc and its loader.
//!
//! The test reads the ELF file itself, because a tool for that can be missing.

/// A little-endian number of `N` bytes at `offset`.
fn number<const N: usize>(elf: &[u8], offset: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..N].copy_from_slice(&elf[offset..offset + N]);
    u64::from_le_bytes(bytes)
}

/// Names in the DT_NEEDED entries of a 64-bit little-endian ELF file.
fn needed(elf: &[u8]) -> Vec<String> {
    const PT_LOAD: u64 = 1;
    const PT_DYNAMIC: u64 = 2;
    const DT_NEEDED: u64 = 1;
    const DT_STRTAB: u64 = 5;
    assert_eq!(&elf[..6], b"\x7fELF\x02\x01", "64 bits, little-endian");
    let (table, size, count) = (number::<8>(elf, 32), number::<2>(elf, 54), number::<2>(elf, 56));
    // (type, file offset, address, bytes in the file)
    let segments: Vec<(u64, u64, u64, u64)> = (0..count)
        .map(|index| (table + index * size) as usize)
        .map(|at| {
            (
                number::<4>(elf, at),
                number::<8>(elf, at + 8),
                number::<8>(elf, at + 16),
                number::<8>(elf, at + 32),
            )
        })
        .collect();
    let Some(&(_, dynamic, _, bytes)) = segments.iter().find(|segment| segment.0 == PT_DYNAMIC)
    else {
        return Vec::new();
    };
    let entries: Vec<(u64, u64)> = (0..bytes / 16)
        .map(|index| (dynamic + index * 16) as usize)
        .map(|at| (number::<8>(elf, at), number::<8>(elf, at + 8)))
        .collect();
    let strings = entries.iter().find(|entry| entry.0 == DT_STRTAB).expect("a string table").1;
    let strings = segments
        .iter()
        .find(|&&(kind, _, address, bytes)| {
            kind == PT_LOAD && (address..address + bytes).contains(&strings)
        })
        .map(|&(_, offset, address, _)| offset + (strings - address))
        .expect("the string table is loaded");
    entries
        .iter()
        .filter(|entry| entry.0 == DT_NEEDED)
        .map(|&(_, offset)| {
            let name = &elf[(strings + offset) as usize..];
            let end = name.iter().position(|&byte| byte == 0).expect("an end of the name");
            String::from_utf8(name[..end].to_vec()).expect("a name in ASCII")
        })
        .collect()
}

#[test]
fn needs_only_libc_and_loader() {
    let elf = std::fs::read(env!("CARGO_BIN_EXE_baton")).expect("the binary");
    let needed = needed(&elf);
    // libm is a part of glibc with a file of its own.
    let is_system = |name: &str| {
        matches!(name, "libc.so.6" | "libm.so.6")
            || (name.starts_with("ld-linux") && name.contains(".so."))
    };
    assert!(needed.iter().all(|name| is_system(name)), "{needed:?}");
}

#[test]
fn the_elf_reader_finds_the_needed_libraries() {
    // This test itself is linked in the ordinary way, so it needs the unwinder too.
    let elf = std::fs::read(std::env::current_exe().expect("our path")).expect("ourselves");
    let needed = needed(&elf);
    assert!(needed.iter().any(|name| name == "libc.so.6"), "{needed:?}");
    assert!(needed.iter().any(|name| name == "libgcc_s.so.1"), "{needed:?}");
}
