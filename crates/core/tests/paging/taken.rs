//! Frames that are taken away at the wrong moment: their pages' contents are lost, and nobody ever sees others in their place.

use selfpage_core::fault::protect::Protection;
use selfpage_core::fault::{Failure, sample};
use selfpage_core::mmu::Refusal;
use selfpage_core::page::State;

use crate::world::{FRAMES, World};
use crate::{Program, WORDS};

/// A program with pages on their way to the store, and which.
fn with_pages_on_their_way() -> (Program, Vec<u64>) {
    let world = World::new("lru");
    let mut program = Program::new(world, 0xdead);
    program.run(50_000).unwrap();
    world.make_room();
    world.evict_only(12);
    let saving = world.pages(State::Saving);
    assert!(saving.len() > 4, "{saving:?}");
    program.forget_what_is_lost();
    (program, saving)
}

/// The frames go to another, and the domain gets others.
fn exchange_frames(world: &World) {
    world.lend_to_another();
    world.lend_anew();
    world.mmu.replace_frames(FRAMES);
}

/// The program goes on: what was lost reads as zero, all else as it was.
fn goes_on(program: &mut Program) {
    program.forget_what_is_lost();
    program.read(0..WORDS).unwrap();
    program.run(50_000).unwrap();
    program.read(0..WORDS).unwrap();
}

#[test]
fn before_they_are_saved() {
    let (mut program, saving) = with_pages_on_their_way();
    let world = program.world;
    exchange_frames(world);
    world.save_all();
    assert_eq!(world.store.lost_so_far(), saving);
    goes_on(&mut program);
}

#[test]
fn before_they_are_saved_and_there_are_no_others_yet() {
    let (mut program, saving) = with_pages_on_their_way();
    let world = program.world;
    let theirs = world.lend_to_another();
    world.save_all();
    assert_eq!(world.store.lost_so_far(), saving);
    assert!(theirs.is_untouched());
    world.lend_anew();
    world.mmu.replace_frames(FRAMES);
    goes_on(&mut program);
}

#[test]
fn while_they_are_saved() {
    let (mut program, saving) = with_pages_on_their_way();
    let world = program.world;
    world.store.before_next_save(move || exchange_frames(world));
    world.save_all();
    assert_eq!(world.store.lost_so_far(), saving);
    goes_on(&mut program);
}

#[test]
fn while_the_pager_looks_whether_they_have_changed() {
    let (mut program, _) = with_pages_on_their_way();
    let world = program.world;
    world.save_all();
    world.store.before_next_look(move || exchange_frames(world));
    world.evict_only(12);
    world.save_all();
    assert!(!world.store.lost_so_far().is_empty());
    goes_on(&mut program);
}

#[test]
fn before_they_are_copied_back() {
    let (mut program, saving) = with_pages_on_their_way();
    let world = program.world;
    exchange_frames(world);
    for page in &saving {
        assert_eq!(world.read(page * 512), Err(Failure::Machine(Refusal::Hole)));
        assert_eq!(world.write(page * 512 + 1, 1), Err(Failure::Machine(Refusal::Hole)));
    }
    assert_eq!(world.pages(State::Saving), saving);
    world.save_all();
    assert_eq!(world.store.lost_so_far(), saving);
    goes_on(&mut program);
}

#[test]
fn while_they_are_flushed() {
    let (mut program, _) = with_pages_on_their_way();
    let world = program.world;
    world.save_all();
    let page = (0..).find(|page| world.is_mapped(*page)).unwrap();
    world.write(page * 512, 7).unwrap();
    program.shadow[page as usize * 512] = 7;
    world.store.before_next_save(move || exchange_frames(world));
    assert_eq!(world.flush(page), Err(Failure::Machine(Refusal::Hole)));
    goes_on(&mut program);
    // With other frames, what is flushed is saved as ever.
    world.write(page * 512, 9).unwrap();
    program.shadow[page as usize * 512] = 9;
    assert_eq!(world.flush(page), Ok(()));
    assert_eq!(world.store.word(page), 9);
    goes_on(&mut program);
}

/// Pages that were sampled, or that nobody might access, are in their frames only.
#[test]
fn while_their_pages_are_aside() {
    for forbidden in [false, true] {
        let (mut program, _) = with_pages_on_their_way();
        let world = program.world;
        world.save_all();
        let aside: Vec<u64> = (0..).filter(|page| world.is_mapped(*page)).take(3).collect();
        for page in &aside {
            world.write(page * 512, 7).unwrap();
            program.shadow[*page as usize * 512] = 7;
            if forbidden { world.protect(*page, Protection::None) } else { world.sample(*page) }
        }
        assert_eq!(world.pages(State::Aside), aside);
        program.forget_what_is_lost();
        exchange_frames(world);
        let flushed = world.flush(aside[0]);
        assert_eq!(flushed, Err(Failure::Machine(Refusal::Hole)));
        aside.iter().for_each(|page| world.protect(*page, Protection::ReadWrite));
        assert_eq!(world.read(aside[1] * 512).ok(), Some(world.store.word(aside[1])));
        sample::end_all(&world.domain);
        assert_eq!(world.domain.stack.sampled(), 0);
        assert!(aside.iter().all(|page| world.store.lost_so_far().contains(page)));
        goes_on(&mut program);
    }
}

/// Another Frame lies where the domain's was, and nobody has said that it is the domain's.
#[test]
fn and_others_are_in_their_place() {
    let (mut program, _) = with_pages_on_their_way();
    let world = program.world;
    world.lend_to_another();
    let theirs = world.lend_anew();
    world.save_all();
    for _ in 0..5_000 {
        program.fail();
    }
    assert!(theirs.is_untouched());
    assert_eq!(world.mapped(), 0);
    world.mmu.replace_frames(FRAMES);
    goes_on(&mut program);
}
