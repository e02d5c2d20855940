//! How long an instruction of ring 0 takes in a virtual machine, compared with one of ring 3: the same loop at each.

use std::time::{Duration, Instant};

use selfpage_core::addr::VirtAddr;
use selfpage_core::physical::PhysAddr;
use selfpage_guest::{Descriptors, Exit, Memory, RING0_CODE, Start, Vm};

use super::super::error::Error;
use super::inside::error;

/// Pages by what they are used for; all are mapped where they lie.
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const PT: u64 = 0x4000;
const DESCRIPTORS: u64 = 0x5000;
const STACK: u64 = 0x6000;
const CODE: u64 = 0x7000;
const MEMORY_BYTES: u64 = 0x8000;

/// Where each loop begins, and what takes the exception by which that of ring 3 ends.
const AT_RING0: u64 = CODE;
const AT_RING3: u64 = CODE + 16;
const HANDLER: u64 = CODE + 32;
const RING0_DATA: u16 = 0x10;

/// Instructions of a round.
const ROUND: u64 = 2;
/// Emulated ones take about a microsecond, others less than one thousandth of that.
const ROUNDS_AT_RING0: u64 = 10_000;
const ROUNDS_AT_RING3: u64 = 500_000;
/// The shortest counts: other programs only add.
const TRIES: usize = 3;

/// How many times as long one takes at ring 0.
///
/// # Errors
/// There is no KVM.
pub fn ratio() -> Result<f64, Error> {
    let memory = Memory::new(PhysAddr(0), MEMORY_BYTES as usize).map_err(error)?;
    let descriptors = prepare(&memory);
    let each = |code, rounds| {
        let shortest = |rounds| -> Result<Duration, Error> {
            let mut shortest = Duration::MAX;
            for _ in 0..TRIES {
                shortest = shortest.min(run(&memory, &descriptors, code, rounds)?);
            }
            Ok(shortest)
        };
        // What it takes to begin and to end is in both.
        let loops = shortest(rounds)?.saturating_sub(shortest(1)?);
        Ok::<_, Error>(loops.as_secs_f64() / ((rounds - 1) * ROUND) as f64)
    };
    Ok(each(AT_RING0, ROUNDS_AT_RING0)? / each(AT_RING3, ROUNDS_AT_RING3)?)
}

fn prepare(memory: &Memory) -> Descriptors {
    let put = |at: u64, word: [u8; 8]| memory.physical().store(PhysAddr(at), u64::from_le_bytes(word));
    for (table, below) in [(PML4, PDPT), (PDPT, PD), (PD, PT)] {
        put(table, (below | 7).to_le_bytes());
    }
    for page in 0..MEMORY_BYTES / 4096 {
        put(PT + page * 8, ((page * 4096) | 7).to_le_bytes());
    }
    // dec rcx; jnz back; then out 0x10, al or ud2; hlt
    put(AT_RING0, [0x48, 0xff, 0xc9, 0x75, 0xfb, 0xe6, 0x10, 0xf4]);
    put(AT_RING3, [0x48, 0xff, 0xc9, 0x75, 0xfb, 0x0f, 0x0b, 0xf4]);
    // out 0x11, al; hlt
    put(HANDLER, [0xe6, 0x11, 0xf4, 0xf4, 0xf4, 0xf4, 0xf4, 0xf4]);
    let handlers = [VirtAddr(HANDLER as usize); 32];
    let descriptors =
        Descriptors { at: VirtAddr(DESCRIPTORS as usize), handlers, stack: VirtAddr(STACK as usize + 4096) };
    descriptors.write(memory.physical(), PhysAddr(DESCRIPTORS));
    descriptors
}

fn run(memory: &Memory, descriptors: &Descriptors, code: u64, rounds: u64) -> Result<Duration, Error> {
    let mut vm = Vm::new().map_err(error)?;
    vm.add(memory).map_err(error)?;
    let start = Start {
        root: PhysAddr(PML4),
        code: VirtAddr(code as usize),
        stack: VirtAddr(STACK as usize + 2048),
        fs_base: 0,
    };
    vm.begin(descriptors, start).map_err(error)?;
    let expected = if code == AT_RING0 { Exit::Port(0x10) } else { Exit::Port(0x11) };
    if code == AT_RING0 {
        let mut special = vm.special_registers().map_err(error)?;
        (special.cs.selector, special.cs.dpl) = (RING0_CODE, 0);
        (special.ss.selector, special.ss.dpl) = (RING0_DATA, 0);
        vm.set_special_registers(&special).map_err(error)?;
    }
    let mut registers = vm.registers().map_err(error)?;
    registers.rcx = rounds;
    vm.set_registers(&registers).map_err(error)?;
    let begun = Instant::now();
    loop {
        match vm.run().map_err(error)? {
            Exit::Interrupted => {}
            exit if exit == expected => return Ok(begun.elapsed()),
            exit => return Err(Error::Failed(format!("a loop in a virtual machine ended with {exit:?}"))),
        }
    }
}
