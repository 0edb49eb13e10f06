//! Which instructions a product executes: the processor stops after each, and a handler counts it.

use std::arch::asm;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use prefixcache_cpu::{Bf16, ByteForm, Form, Rows, RowsMut, Team, WeightMemory};
use prefixcache_ops::int8::{Int8Weight, QuantizedRows};
use prefixcache_ops::{Format, PackedLinear};

use crate::kernels::{INPUTS, PANEL, blocks};

/// The most instructions of a product that is counted.
const ROOM: usize = 2_000_000;

/// Addresses, in their order.
static STEPS: [AtomicUsize; ROOM] = [const { AtomicUsize::new(0) }; ROOM];
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// The flag that makes the processor stop after each instruction.
const TRAP: u64 = 0x100;

extern "C" fn on_step(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes a context to handlers that ask for one.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    let at = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    // Relaxed: one thread alone steps, and reads them afterwards.
    let taken = TAKEN.fetch_add(1, Ordering::Relaxed);
    STEPS[taken % ROOM].store(at, Ordering::Relaxed);
}

/// Runs `product` and prints how often it executed the instruction at each address of the program.
fn count(name: &str, product: impl FnOnce()) {
    TAKEN.store(0, Ordering::Relaxed);
    // SAFETY: the flag alone changes, which the handler is ready for.
    unsafe { asm!("pushfq", "or qword ptr [rsp], {trap}", "popfq", trap = const TRAP) };
    product();
    // SAFETY: as above.
    unsafe { asm!("pushfq", "and qword ptr [rsp], {all}", "popfq", all = const !(TRAP as i32)) };
    let taken = TAKEN.load(Ordering::Relaxed);
    assert!(taken <= ROOM, "{name} takes {taken} instructions");
    let mut counts = BTreeMap::<usize, usize>::new();
    for step in &STEPS[..taken] {
        *counts.entry(step.load(Ordering::Relaxed)).or_default() += 1;
    }
    let base = base();
    let counts = counts.iter().filter(|(at, _)| **at >= base);
    let counts: Vec<_> = counts
        .map(|(at, n)| format!("{:x}:{n}", at - base))
        .collect();
    println!("steps {name} {}", counts.join(","));
}

/// Where the program was loaded.
fn base() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps of memory");
    let start = maps.split('-').next().expect("a first one");
    usize::from_str_radix(start, 16).expect("an address")
}

/// Steps through a panel's products, by format and number of rows; those of many rows are alike.
pub fn measure() {
    // SAFETY: all zeros are such a struct, and the handler does nothing that a handler must not.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_step as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let failed = libc::sigaction(libc::SIGTRAP, &raw const action, std::ptr::null_mut());
        assert_eq!(failed, 0, "a handler");
    }
    let (form, team, memory) = (
        Form::detect(),
        Team::new(1).expect("a thread"),
        WeightMemory::default(),
    );
    for rows in [1, 8, 24] {
        let x = vec![Bf16::from_f32(0.25); rows * INPUTS];
        let x = Rows::new(&x, INPUTS);
        let mut out = vec![Bf16::from_f32(0.0); rows * PANEL];
        let mut forward = |layer: &PackedLinear<Bf16>| {
            let out = RowsMut::new(&mut out, PANEL);
            let done = layer.forward::<Bf16>(form, &team, x, None, &out);
            done.expect("memory");
        };
        let mut layer = PackedLinear::new(INPUTS, &[PANEL], false).expect("memory");
        let weight = vec![Bf16::from_f32(0.5); PANEL * INPUTS];
        layer
            .copy_rows(&memory, 0, Rows::new(&weight, INPUTS))
            .expect("memory");
        count(&format!("bfloat16 all {rows}"), || forward(&layer));
        let quantized = QuantizedRows::new(ByteForm::of(form), &team, x).expect("memory");
        for format in Format::ALL {
            let blocks = blocks(format, PANEL);
            let blocks = Rows::new(&blocks, format.row_bytes(INPUTS));
            if rows <= 8 {
                let mut layer = PackedLinear::new(INPUTS, &[PANEL], false).expect("memory");
                layer
                    .copy_blocks(&memory, form, &team, 0, format, blocks)
                    .expect("finite blocks");
                count(&format!("exact {} {rows}", format.name()), || {
                    forward(&layer)
                });
            }
            let weight = Int8Weight::new(&memory, format, INPUTS, PANEL);
            let mut weight = weight.expect("memory");
            weight.pack(&team, blocks);
            let mut sums = vec![[0.0; PANEL]; rows];
            count(&format!("int8 {} {rows}", format.name()), || {
                weight.multiply(ByteForm::of(form), 0, &quantized, 0, &mut sums);
            });
        }
    }
}
