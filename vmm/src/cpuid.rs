//! What `CPUID` tells a guest: what the host's KVM supports, less what a sandbox must not have, with the
//! topology of this machine (one socket, one thread a core) in place of the host's.
//!
//! [`filter`] is a pure function over the table of `KVM_GET_SUPPORTED_CPUID`. Sources: Intel SDM volume 2
//! (`CPUID`), AMD APM volume 3 appendix E, Linux `Documentation/virt/kvm/api.rst` (`KVM_GET_SUPPORTED_CPUID`,
//! `KVM_CAP_TSC_DEADLINE_TIMER`).

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// What the topology leaves say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// vCPUs of the machine, 1 to 32.
    pub cpus: u8,
    /// APIC id of the vCPU that this table is for.
    pub apic_id: u8,
    /// KVM emulates the TSC deadline timer (`KVM_CAP_TSC_DEADLINE_TIMER`).
    pub tsc_deadline: bool,
}

// Leaf 1.
const ECX1_MONITOR: u32 = 1 << 3;
const ECX1_VMX: u32 = 1 << 5;
const ECX1_SMX: u32 = 1 << 6;
const ECX1_PDCM: u32 = 1 << 15;
const ECX1_X2APIC: u32 = 1 << 21;
const ECX1_TSC_DEADLINE: u32 = 1 << 24;
const ECX1_HYPERVISOR: u32 = 1 << 31;
const EDX1_HTT: u32 = 1 << 28;
// Leaf 7.
const EBX7_SGX: u32 = 1 << 2;
const ECX7_SGX_LC: u32 = 1 << 30;
// Leaf 0x8000_0001.
const ECX8_CMP_LEGACY: u32 = 1 << 1;
const ECX8_SVM: u32 = 1 << 2;
const ECX8_PERFCTR: u32 = 1 << 23;
/// Only "ARAT" (the APIC timer never stops) means something to a guest in leaf 6.
const EAX6_ARAT: u32 = 1 << 2;

/// Bits of an APIC id that number the cores: `ceil(log2(cpus))`.
fn core_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}

/// Turns the table of what the host supports into the table for one vCPU.
///
/// KVM's own leaves (0x4000_0000 and on) stay: they carry kvmclock and its friends.
pub fn filter(table: &mut CpuId, topology: Topology) {
    // Leaf 0xb and 0x1f are written anew: the host's have as many levels as the host.
    table.retain(|entry| !matches!(entry.function, 0xb | 0x1f));
    let (max, amd) = table
        .as_slice()
        .iter()
        .find(|entry| entry.function == 0)
        .map_or((0, false), |entry| (entry.eax, is_amd(entry)));
    for entry in table.as_mut_slice() {
        mask(entry);
        place(entry, topology, amd);
    }
    for leaf in [0xb, 0x1f] {
        if max >= leaf {
            for level in levels(leaf, topology) {
                // A table without room keeps the guest on leaf 1 and 4, which say the same.
                let _ = table.push(level);
            }
        }
    }
}

fn is_amd(leaf0: &kvm_cpuid_entry2) -> bool {
    // "AuthenticAMD" and "HygonGenuine" use the same leaves.
    leaf0.ebx == 0x6874_7541 || leaf0.ebx == 0x6f67_7948
}

/// Removes what a sandbox has no use for: nested virtualization, enclaves, counters, sleep states.
fn mask(entry: &mut kvm_cpuid_entry2) {
    match entry.function {
        1 => {
            entry.ecx &= !(ECX1_MONITOR | ECX1_VMX | ECX1_SMX | ECX1_PDCM);
            entry.ecx |= ECX1_HYPERVISOR;
        }
        6 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (entry.eax & EAX6_ARAT, 0, 0, 0),
        7 if entry.index == 0 => {
            entry.ebx &= !EBX7_SGX;
            entry.ecx &= !ECX7_SGX_LC;
        }
        // MWAIT, counters, SGX, processor trace, SVM, encrypted memory, counters of AMD.
        5 | 0xa | 0x12 | 0x14 | 0x8000_000a | 0x8000_001f | 0x8000_0022 => clear(entry),
        0x8000_0001 => entry.ecx &= !(ECX8_SVM | ECX8_PERFCTR),
        _ => {}
    }
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

/// Writes the topology into the leaves that carry it.
fn place(entry: &mut kvm_cpuid_entry2, topology: Topology, amd: bool) {
    let Topology {
        cpus,
        apic_id,
        tsc_deadline,
    } = topology;
    let (cpus, apic_id) = (u32::from(cpus), u32::from(apic_id));
    match entry.function {
        1 => {
            // EBX: 31-24 initial APIC id, 23-16 addressable ids, 15-8 CLFLUSH size in 8 bytes.
            let clflush = if entry.ebx & 0xff00 == 0 {
                8 << 8
            } else {
                entry.ebx & 0xff00
            };
            entry.ebx = (apic_id << 24) | (cpus << 16) | clflush | (entry.ebx & 0xff);
            // The deadline timer is KVM's own work and so not among what the CPU "supports".
            if tsc_deadline {
                entry.ecx |= ECX1_TSC_DEADLINE;
            }
            // x2APIC is emulated by KVM on any host.
            entry.ecx |= ECX1_X2APIC;
            if cpus > 1 {
                entry.edx |= EDX1_HTT;
            } else {
                entry.edx &= !EDX1_HTT;
            }
        }
        // EAX: 31-26 cores in the package, 25-14 vCPUs that share this cache; both less one.
        4 if entry.eax & 0x1f != 0 => {
            entry.eax = cache_sharing(entry.eax, cpus) | ((cpus - 1) << 26)
        }
        0x8000_001d if entry.eax & 0x1f != 0 => entry.eax = cache_sharing(entry.eax, cpus),
        0x8000_0001 if amd && cpus > 1 => entry.ecx |= ECX8_CMP_LEGACY,
        // ECX: 7-0 cores less one, 15-12 bits of the APIC id that number them.
        0x8000_0008 if amd => {
            entry.ecx = (cpus - 1) | (core_bits(topology.cpus) << 12);
        }
        // EAX: APIC id. EBX: core id, one thread a core. ECX: one node.
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (apic_id, apic_id, 0, 0),
        _ => {}
    }
}

/// Bits 25-14: level 1 and 2 belong to one vCPU, level 3 to all.
fn cache_sharing(eax: u32, cpus: u32) -> u32 {
    let level = (eax >> 5) & 7;
    let sharing = if level >= 3 { cpus - 1 } else { 0 };
    (eax & 0x3fff) | (sharing << 14)
}

/// Levels of leaf 0xb or 0x1f: threads of a core, cores of the package, and the end mark.
fn levels(leaf: u32, topology: Topology) -> [kvm_cpuid_entry2; 3] {
    // ECX: 7-0 the level asked for, 15-8 its type (1 thread, 2 core, 0 none).
    [
        (0, 1, 0, 1),
        (1, 2, core_bits(topology.cpus), u32::from(topology.cpus)),
        (2, 0, 0, 0),
    ]
    .map(|(index, kind, shift, count)| kvm_cpuid_entry2 {
        function: leaf,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: index | (kind << 8),
        edx: u32::from(topology.apic_id),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn filtered(vendor: u32, topology: Topology) -> CpuId {
        let all = u32::MAX;
        let mut table = CpuId::from_entries(&[
            entry(0, 0, [0x1f, vendor, 0, 0]),
            entry(1, 0, [0, 0x0020_0800, all, all]),
            entry(4, 1, [0xfc00_0021, 0, 0, 0]),
            entry(4, 3, [0xfc00_0163, 0, 0, 0]),
            entry(4, 4, [0, 0, 0, 0]),
            entry(0xa, 0, [all; 4]),
            entry(0xb, 0, [all; 4]),
            entry(0x4000_0001, 0, [0x0100_7efb, 0, 0, 0]),
            entry(0x8000_0001, 0, [0, 0, all & !ECX8_CMP_LEGACY, all]),
            entry(0x8000_0008, 0, [0x3030, 0, all, 0]),
            entry(0x8000_000a, 0, [all; 4]),
            entry(0x8000_001e, 0, [all; 4]),
        ])
        .unwrap();
        filter(&mut table, topology);
        table
    }

    fn leaf(table: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *table
            .as_slice()
            .iter()
            .find(|e| e.function == function && e.index == index)
            .unwrap()
    }

    const AMD: u32 = 0x6874_7541;
    const INTEL: u32 = 0x756e_6547;
    const FOUR: Topology = Topology {
        cpus: 4,
        apic_id: 3,
        tsc_deadline: true,
    };

    #[test]
    fn nested_virtualization_and_counters_are_not_offered() {
        for vendor in [AMD, INTEL] {
            let table = filtered(vendor, FOUR);
            assert_eq!(
                leaf(&table, 1, 0).ecx & (ECX1_VMX | ECX1_SMX | ECX1_MONITOR | ECX1_PDCM),
                0
            );
            assert_eq!(
                leaf(&table, 0x8000_0001, 0).ecx & (ECX8_SVM | ECX8_PERFCTR),
                0
            );
            assert_eq!(leaf(&table, 0x8000_000a, 0).eax, 0);
            assert_eq!(leaf(&table, 0xa, 0).eax, 0);
        }
    }

    #[test]
    fn kvm_leaves_stay() {
        assert_eq!(leaf(&filtered(AMD, FOUR), 0x4000_0001, 0).eax, 0x0100_7efb);
    }

    #[test]
    fn leaf_1_has_apic_id_count_and_the_deadline_timer_only_where_kvm_has_it() {
        let one = leaf(&filtered(INTEL, FOUR), 1, 0);
        assert_eq!(one.ebx, 0x0304_0800);
        assert_ne!(one.edx & EDX1_HTT, 0);
        assert_ne!(one.ecx & ECX1_HYPERVISOR, 0);
        let mut table = CpuId::from_entries(&[entry(1, 0, [0; 4])]).unwrap();
        filter(
            &mut table,
            Topology {
                cpus: 1,
                apic_id: 0,
                tsc_deadline: false,
            },
        );
        let one = leaf(&table, 1, 0);
        assert_eq!(one.ecx, ECX1_HYPERVISOR | ECX1_X2APIC);
        assert_eq!(one.edx, 0);
        filter(
            &mut table,
            Topology {
                cpus: 1,
                apic_id: 0,
                tsc_deadline: true,
            },
        );
        assert_ne!(leaf(&table, 1, 0).ecx & ECX1_TSC_DEADLINE, 0);
    }

    #[test]
    fn caches_are_private_up_to_level_2_and_shared_above() {
        let table = filtered(INTEL, FOUR);
        let (first, third) = (leaf(&table, 4, 1).eax, leaf(&table, 4, 3).eax);
        assert_eq!(((first >> 14) & 0xfff, first >> 26), (0, 3));
        assert_eq!(((third >> 14) & 0xfff, third >> 26), (3, 3));
        assert_eq!(leaf(&table, 4, 4).eax, 0);
    }

    #[test]
    fn extended_topology_has_two_levels_and_an_end() {
        for cpus in [1u8, 2, 3, 4, 5, 31, 32] {
            let table = filtered(
                INTEL,
                Topology {
                    cpus,
                    apic_id: cpus - 1,
                    tsc_deadline: true,
                },
            );
            for function in [0xb, 0x1f] {
                let levels: Vec<_> = (0..3).map(|index| leaf(&table, function, index)).collect();
                assert_eq!((levels[0].eax, levels[0].ebx, levels[0].ecx), (0, 1, 0x100));
                assert_eq!((levels[1].ebx, levels[1].ecx), (u32::from(cpus), 0x201));
                assert!(1u32 << levels[1].eax >= u32::from(cpus));
                assert_eq!((levels[2].ebx, levels[2].ecx), (0, 2));
                assert!(levels.iter().all(|level| level.edx == u32::from(cpus) - 1));
            }
        }
    }

    #[test]
    fn amd_counts_cores_and_names_the_core() {
        let table = filtered(AMD, FOUR);
        assert_eq!(leaf(&table, 0x8000_0008, 0).ecx, 3 | (2 << 12));
        assert_ne!(leaf(&table, 0x8000_0001, 0).ecx & ECX8_CMP_LEGACY, 0);
        let core = leaf(&table, 0x8000_001e, 0);
        assert_eq!((core.eax, core.ebx, core.ecx), (3, 3, 0));
        assert_eq!(leaf(&filtered(INTEL, FOUR), 0x8000_0008, 0).ecx, u32::MAX);
    }
}
