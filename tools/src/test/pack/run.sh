#!/bin/sh
# Runs the tests of this archive on the KVM of this machine.
set -eu

usage() {
    cat <<'END'
usage: run [--kvm host] [--patience N] [--without NEED]... [FILTER]

Runs the packed tests, those on stock kernels and those with fast guests, on this machine's own KVM. Needs no Rust, no
cargo and no checkout. Whatever a test needs besides is looked for first, and a missing thing is an error.

  --kvm host       the only one there is: an archive has no nest
  --patience N     deadlines N times as long, for slow machines, 1 to 100 [default: 1]
  --without NEED   leave out the tests that need it: root, util-linux, systemd or python3
  FILTER           the tests whose name contains this only

Leaves with 0 when all passed, 1 when a test failed or none was run, 125 when it could not begin.
END
}

fail() {
    echo "run: $*" >&2
    exit 125
}

# What a need is, where it is missing; nothing where it is there.
missing() {
    case $1 in
        root)
            [ "$(id -u)" = 0 ] || echo "root is missing: run this with sudo"
            ;;
        util-linux)
            for program in unshare nsenter setpriv mount; do
                command -v "$program" >/dev/null 2>&1 ||
                    echo "$program is missing: apt-get install util-linux mount"
            done
            ;;
        systemd)
            [ -e /sys/fs/cgroup/cgroup.controllers ] || echo "cgroup2 is not in /sys/fs/cgroup: boot with it"
            [ -x /lib/systemd/systemd ] && command -v systemctl >/dev/null 2>&1 &&
                command -v systemd-analyze >/dev/null 2>&1 ||
                echo "systemd is missing (/lib/systemd/systemd, systemctl, systemd-analyze): apt-get install systemd"
            ;;
        python3)
            command -v python3 >/dev/null 2>&1 || echo "python3 is missing: apt-get install python3"
            ;;
        *)
            echo "the need $1 of tests/needs is unknown: make the archive anew"
            ;;
    esac
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
kvm=host patience=1 filter='' without=' '
while [ $# -gt 0 ]; do
    option=$1
    case $option in
        --kvm | --patience | --without)
            [ $# -gt 1 ] || fail "$option needs a value; see run --help"
            value=$2
            shift
            ;;
        --*=*)
            value=${option#*=}
            option=${option%%=*}
            ;;
    esac
    shift
    case $option in
        --kvm)
            kvm=$value
            ;;
        --patience)
            case $value in
                [1-9] | [1-9][0-9] | 100) patience=$value ;;
                *) fail "--patience $value: expected a number from 1 to 100" ;;
            esac
            ;;
        --without)
            case $value in
                root | util-linux | systemd | python3) without="$without$value " ;;
                *) fail "--without $value: expected root, util-linux, systemd or python3" ;;
            esac
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*)
            fail "$option is no option; see run --help"
            ;;
        '' | *[!A-Za-z0-9_:]*)
            fail "the filter '$option' has more than letters, digits, _ and : in it"
            ;;
        *)
            [ -z "$filter" ] || fail "two filters, $filter and $option: only one is possible"
            filter=$option
            ;;
    esac
done
[ "$kvm" = host ] || fail "--kvm $kvm: an archive runs on this machine's own KVM only, --kvm host; a checkout has the nest"

# All that is missing is named before anything runs.
absent=0
lack() {
    echo "run: $*" >&2
    absent=1
}

if ! [ -e /dev/kvm ]; then
    lack "/dev/kvm is missing: load kvm_intel or kvm_amd, and switch virtualization on in the firmware"
elif ! { [ -r /dev/kvm ] && [ -w /dev/kvm ]; }; then
    lack "/dev/kvm cannot be read and written: usermod -aG kvm $(id -un), then log in again; or run this with sudo"
fi

# The tests that are left out, and the needs of the others.
skipped=' ' needs=' '
while read -r need test; do
    case $need in '' | '#'*) continue ;; esac
    case $test in *"$filter"*) ;; *) continue ;; esac
    case $without in
        *" $need "*) case $skipped in *" $test "*) ;; *) skipped="$skipped$test " ;; esac ;;
    esac
done <"$here/tests/needs"
while read -r need test; do
    case $need in '' | '#'*) continue ;; esac
    case $test in *"$filter"*) ;; *) continue ;; esac
    case $skipped$needs in *" $test "* | *" $need "*) continue ;; esac
    needs="$needs$need "
    what=$(missing "$need")
    [ -z "$what" ] || lack "$what; or leave its tests out: --without $need"
done <"$here/tests/needs"
[ "$absent" = 0 ] || exit 125

# Variables of a user's own are not the tests'.
unset VMM_DIR VMM_OUT VMM_NEGATIVE_CONTROL NOTIFY_SOCKET
export VMM_KVM=host VMM_PATIENCE="$patience" VMM_BIN="$here/bin/vmm" VMM_IMAGE="$here/image"
export VMM_KERNEL_BZIMAGE="$here/image/vmlinuz" CARGO_MANIFEST_DIR="$here/tests"
if ! report=$("$VMM_BIN" doctor); then
    printf '%s\n' "$report" >&2
    fail "the KVM of this machine cannot run the tests"
fi

logs=$(mktemp -d "${TMPDIR:-/tmp}/vmm-tests.XXXXXX")
trap 'rm -rf "$logs"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
echo "run: tests of commit $(cat "$here/COMMIT")" >&2
passed=0 failed=0 ignored=0 bad=''
while read -r program count <&3; do
    set -- --test-threads=1
    [ -z "$filter" ] || set -- "$@" "$filter"
    for test in $skipped; do set -- "$@" --skip "$test"; done
    echo "-- $program" >&2
    {
        (cd "$here/tests" && exec "bin/$program" "$@" </dev/null 3<&-) || echo "$?" >"$logs/status"
    } | tee "$logs/report" || bad="$bad $program (report not kept)"
    # The last such line: a test's children may write to the same stream.
    result=$(sed -n 's/^test result: [A-Za-z]*\. \([0-9]*\) passed; \([0-9]*\) failed; \([0-9]*\) ignored; [0-9]* measured; \([0-9]*\) filtered out.*/\1 \2 \3 \4/p' "$logs/report" | tail -n 1)
    # shellcheck disable=SC2086 # Four words.
    set -- $result
    if [ $# != 4 ]; then
        bad="$bad $program (no result)"
    else
        passed=$((passed + $1)) failed=$((failed + $2)) ignored=$((ignored + $3))
        [ $(($1 + $2 + $3 + $4)) = "$count" ] || bad="$bad $program (not all of its $count tests)"
        ! [ -e "$logs/status" ] || bad="$bad $program (status $(cat "$logs/status"))"
    fi
    rm -f "$logs/status"
done 3<"$here/tests/programs"

module=kvm
for folder in /sys/module/kvm_*; do
    ! [ -d "$folder" ] || { module=${folder##*/} && break; }
done
summary="$passed passed"
[ "$failed" = 0 ] || summary="$summary, $failed failed"
[ "$ignored" = 0 ] || summary="$summary, $ignored ignored"
# shellcheck disable=SC2086 # One word a test.
set -- $skipped
[ $# = 0 ] || summary="$summary, $# left out for --without${without% }"
[ -z "$bad" ] || echo "run: failed:$bad" >&2
status=0
[ -z "$bad" ] && [ "$failed" = 0 ] || status=1
if [ "$passed" = 0 ] && [ "$status" = 0 ]; then
    echo "run: no test was run" >&2
    status=1
fi
echo "machine tests: $summary on host ($module, release)"
exit "$status"
