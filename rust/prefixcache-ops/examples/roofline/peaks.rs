//! Rates of single instructions and of plain reads.
//!
//! Loops are written as assembly, so that no compiler removes or joins what they measure.

use std::arch::asm;

use crate::best;

/// Turns of each loop of instructions.
const LOOPS: u64 = 40_000;

/// Instructions in a turn.
const A_LOOP: u64 = 16;

/// Turns of everything.
const TURNS: usize = 40;

/// A loop of [`A_LOOP`] instructions, in which `\r` is the number of each.
macro_rules! loop_of {
    ($text:literal) => {{
        #[target_feature(enable = "avx512f")]
        fn run(memory: *const u8) {
            // SAFETY: the processor has the instructions (`measure` looks); they touch no more than
            // 1 KiB of `memory`, which nobody else uses, and registers named as lost.
            unsafe {
                asm!(
                    ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,30,31",
                    "vpxord zmm\\r, zmm\\r, zmm\\r",
                    ".endr",
                    "xor eax, eax",
                    "mov ecx, 1",
                    "2:",
                    ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
                    $text,
                    ".endr",
                    "dec r8",
                    "jnz 2b",
                    inout("r8") LOOPS => _,
                    in("rdi") memory,
                    clobber_abi("C"),
                );
            }
        }
        run as unsafe fn(*const u8)
    }};
}

/// A name and a loop, which needs 1 KiB of memory and the processor's AVX-512 with bf16 and VNNI.
type Loop = (&'static str, unsafe fn(*const u8));

/// Independent instructions: sixteen results, which is more than latency and width ask for.
fn instructions() -> Vec<Loop> {
    vec![
        ("vdpbf16ps", loop_of!("vdpbf16ps zmm\\r, zmm30, zmm31")),
        ("vpdpbusd", loop_of!("vpdpbusd zmm\\r, zmm30, zmm31")),
        ("vfmadd231ps", loop_of!("vfmadd231ps zmm\\r, zmm30, zmm31")),
        ("vmulps", loop_of!("vmulps zmm\\r, zmm30, zmm31")),
        ("vpmulld", loop_of!("vpmulld zmm\\r, zmm30, zmm31")),
        ("vcvtdq2ps", loop_of!("vcvtdq2ps zmm\\r, zmm30")),
        ("vcvtph2ps", loop_of!("vcvtph2ps zmm\\r, ymm30")),
        (
            "vcvtne2ps2bf16",
            loop_of!("vcvtne2ps2bf16 zmm\\r, zmm30, zmm31"),
        ),
        ("vpermps", loop_of!("vpermps zmm\\r, zmm30, zmm31")),
        ("vpermt2ps", loop_of!("vpermt2ps zmm\\r, zmm30, zmm31")),
        ("vpsrld", loop_of!("vpsrld zmm\\r, zmm30, 4")),
        ("vpsravd", loop_of!("vpsravd zmm\\r, zmm30, zmm31")),
        ("vpandd", loop_of!("vpandd zmm\\r, zmm30, zmm31")),
        (
            "vpternlogd",
            loop_of!("vpternlogd zmm\\r, zmm30, zmm31, 248"),
        ),
        ("vaddps", loop_of!("vaddps zmm\\r, zmm30, zmm31")),
        ("load", loop_of!("vmovups zmm\\r, [rdi + 64*\\r]")),
        ("store", loop_of!("vmovups [rdi + 64*\\r], zmm30")),
        (
            "broadcast",
            loop_of!("vpbroadcastd zmm\\r, dword ptr [rdi + 4*\\r]"),
        ),
        (
            "dot+broadcast",
            loop_of!("vdpbf16ps zmm\\r, zmm30, dword ptr [rdi + 4*\\r]{{1to16}}"),
        ),
        // What two lookups of codes and the rounding of their numbers to a word are made of.
        (
            "dequantizing,,,,,,",
            loop_of!(
                "vpsrld zmm16, zmm30, 4\nvpsrld zmm17, zmm30, 8\n\
                 vpermps zmm18, zmm16, zmm31\nvpermps zmm19, zmm17, zmm31\n\
                 vfmadd213ps zmm18, zmm30, zmm31\nvfmadd213ps zmm19, zmm30, zmm31\n\
                 vcvtne2ps2bf16 zmm\\r, zmm18, zmm19"
            ),
        ),
        // Two of different kinds: as fast as the slower of them alone, or as both one after the other?
        (
            "vdpbf16ps,vfmadd231ps",
            loop_of!("vdpbf16ps zmm\\r, zmm30, zmm31\nvfmadd231ps zmm\\r, zmm30, zmm31"),
        ),
        (
            "vdpbf16ps,vcvtne2ps2bf16",
            loop_of!("vdpbf16ps zmm\\r, zmm30, zmm31\nvcvtne2ps2bf16 zmm16, zmm30, zmm31"),
        ),
        (
            "vdpbf16ps,vpermps",
            loop_of!("vdpbf16ps zmm\\r, zmm30, zmm31\nvpermps zmm16, zmm30, zmm31"),
        ),
        (
            "vdpbf16ps,vpsrld",
            loop_of!("vdpbf16ps zmm\\r, zmm30, zmm31\nvpsrld zmm16, zmm30, 4"),
        ),
        (
            "vdpbf16ps,vaddps",
            loop_of!("vdpbf16ps zmm\\r, zmm30, zmm31\nvaddps zmm16, zmm30, zmm31"),
        ),
        (
            "vpdpbusd,vfmadd231ps",
            loop_of!("vpdpbusd zmm\\r, zmm30, zmm31\nvfmadd231ps zmm\\r, zmm30, zmm31"),
        ),
        (
            "vpdpbusd,vcvtdq2ps",
            loop_of!("vpdpbusd zmm\\r, zmm30, zmm31\nvcvtdq2ps zmm16, zmm30"),
        ),
        (
            "vpermps,vcvtne2ps2bf16",
            loop_of!("vpermps zmm\\r, zmm30, zmm31\nvcvtne2ps2bf16 zmm16, zmm30, zmm31"),
        ),
        (
            "vpermps,vpsrld",
            loop_of!("vpermps zmm\\r, zmm30, zmm31\nvpsrld zmm16, zmm30, 4"),
        ),
        (
            "vpsrld,vpandd",
            loop_of!("vpsrld zmm\\r, zmm30, 4\nvpandd zmm16, zmm30, zmm31"),
        ),
    ]
}

/// Instructions that wait for the one before. That of the clock comes first.
fn chains() -> Vec<Loop> {
    vec![
        ("add", loop_of!("add rax, rcx")),
        ("imul", loop_of!("imul rax, rcx")),
        ("vdpbf16ps", loop_of!("vdpbf16ps zmm0, zmm30, zmm31")),
        ("vpdpbusd", loop_of!("vpdpbusd zmm0, zmm30, zmm31")),
        ("vfmadd231ps", loop_of!("vfmadd231ps zmm0, zmm30, zmm31")),
    ]
}

/// Reads `bytes` bytes, a multiple of 512.
#[target_feature(enable = "avx512f")]
fn read(memory: *const u8, bytes: usize) {
    // SAFETY: the caller's memory is as long; registers alone are written.
    unsafe {
        asm!(
            "2:",
            ".irp r,0,1,2,3,4,5,6,7",
            "vmovups zmm\\r, [rdi + 64*\\r]",
            ".endr",
            "add rdi, 512",
            "cmp rdi, rsi",
            "jb 2b",
            inout("rdi") memory => _,
            in("rsi") memory.wrapping_add(bytes),
            clobber_abi("C"),
        );
    }
}

const READS: [(&str, usize); 4] = [
    ("L1", 32 << 10),
    ("L2", 512 << 10),
    ("L3", 8 << 20),
    ("memory", 256 << 20),
];

/// Bytes that a turn of reading goes over, in passes.
const READ_BYTES: usize = 16 << 20;

pub fn measure() {
    let has = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni");
    if !has {
        println!("the processor has no AVX-512 with bf16 and VNNI: no peaks");
        return;
    }
    let mut memory = vec![1_u8; READS[3].1];
    let start = memory.as_mut_ptr().cast_const();
    let start = start.wrapping_add(start.align_offset(64));
    let (chains, instructions) = (chains(), instructions());
    let loops = chains.iter().chain(&instructions);
    let mut ways: Vec<Box<dyn FnMut()>> = Vec::new();
    for &(_, run) in loops {
        // SAFETY: the processor has the features, and `memory` more than 1 KiB.
        ways.push(Box::new(move || unsafe { run(start) }));
    }
    let mut at = 0;
    for (_, bytes) in READS {
        let bytes = bytes - 512;
        ways.push(Box::new(move || {
            for _ in 0..(READ_BYTES / bytes).max(1) {
                // A part that other turns have not read: the next one.
                let part = if bytes > READ_BYTES { at } else { 0 };
                at = (at + READ_BYTES) % (READS[3].1 - READ_BYTES);
                // SAFETY: the processor has AVX-512, and the part lies in `memory`.
                unsafe { read(start.wrapping_add(part), bytes.min(READ_BYTES - 512)) };
            }
        }));
    }
    let seconds = best(TURNS, &mut ways);
    let count = (LOOPS * A_LOOP) as f64;
    let clock = count / seconds[0];
    println!("clock {:.3}", clock / 1e9);
    for ((name, _), seconds) in chains.iter().zip(&seconds) {
        println!("chain {name} {:.2}", clock * seconds / count);
    }
    for ((name, _), seconds) in instructions.iter().zip(&seconds[chains.len()..]) {
        let kinds = name.split(',').count() as f64;
        println!("peak {name} {:.2}", kinds * count / (clock * seconds));
    }
    for ((name, bytes), seconds) in READS
        .iter()
        .zip(&seconds[chains.len() + instructions.len()..])
    {
        let bytes = bytes - 512;
        let read = bytes.min(READ_BYTES - 512) * (READ_BYTES / bytes).max(1);
        println!("read {name} {:.1}", read as f64 / seconds / 1e9);
    }
}
