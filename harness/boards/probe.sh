# What a board is. One round trip; POSIX sh, for dash, busybox ash and toybox as well.
# Sections begin with a line "=== NONCE name"; harness/boards/facts.py reads them.
# Before this come: N (the nonce), P (a Python to try first, or empty) and the candidate folders as
# positional parameters.
LC_ALL=C; export LC_ALL
exec 2>/dev/null </dev/null
section() { printf '\n=== %s %s\n' "$N" "$1"; }

section 'probe 1'
section clock
date +%s
section uname
uname -s; uname -r; uname -m; uname -n
section os
cat /etc/os-release || cat /usr/lib/os-release
v=$(getprop ro.build.version.release) && printf 'ANDROID=%s\n' "$v"
section libc
getconf GNU_LIBC_VERSION
ldd --version 2>&1 | head -n 3
ls /lib/ld-musl-* /system/bin/linker*
section elf
# Word size and machine of the userland: uname tells those of the kernel.
od -A n -t x1 -N 20 /proc/self/exe
section cpuinfo
grep -E '^(processor|flags|Features|features|isa|model name|CPU implementer|CPU part|Serial|Hardware|Model)' /proc/cpuinfo
section allowed
grep '^Cpus_allowed_list' /proc/self/status
section cpus
for c in /sys/devices/system/cpu/cpu[0-9]*; do
  [ -d "$c" ] || continue
  printf '%s' "${c##*/}"
  for f in cpufreq/cpuinfo_max_freq cpu_capacity cpufreq/scaling_governor; do
    v=
    [ -r "$c/$f" ] && read -r v <"$c/$f"
    printf ' %s' "${v:--}"
  done
  echo
done
section memory
grep -E '^(MemTotal|MemFree|MemAvailable|Cached)' /proc/meminfo
v=$(ulimit -d) && printf 'ulimit_data %s\n' "$v"
v=$(ulimit -v) && printf 'ulimit_virtual %s\n' "$v"
for f in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
  v=
  [ -r "$f" ] && read -r v <"$f" && printf 'cgroup %s\n' "$v"
done
section boot
cat /proc/sys/kernel/random/boot_id
grep '^btime' /proc/stat
section serial
for f in /proc/device-tree/serial-number /sys/firmware/devicetree/base/serial-number; do
  [ -r "$f" ] && tr -d '\000' <"$f" && echo && break
done
section model
for f in /proc/device-tree/model /sys/class/dmi/id/product_name; do
  [ -r "$f" ] && tr -d '\000' <"$f" && echo && break
done
section thermal
for z in /sys/class/thermal/thermal_zone*; do
  [ -d "$z" ] || continue
  t=; v=
  [ -r "$z/type" ] && read -r t <"$z/type"
  [ -r "$z/temp" ] && read -r v <"$z/temp"
  printf '%s %s %s\n' "${z##*/}" "${v:--}" "$t"
done
section tools
for t in base64 busybox cksum cmp dd df gcc gzip kill md5sum mkfifo nohup od perf pgrep ps \
  setsid sha256sum sh stat strace tar taskset timeout wc xz; do
  command -v "$t" >/dev/null && printf '%s\n' "$t"
done
section python
code='
import sys
try:
    import struct, sysconfig, os
    missing = []
    for name in ("ctypes", "json", "mmap", "select", "zlib", "fcntl"):
        try: __import__(name)
        except ImportError: missing.append(name)
    try: libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except Exception: libc = ""
    found = [sys.executable, "%d.%d.%d" % sys.version_info[:3], str(struct.calcsize("P") * 8),
        sys.implementation.name, sysconfig.get_config_var("SOABI") or "", libc, ",".join(missing)]
    good = sys.version_info >= (3, 9) and not missing
except Exception:
    found = [sys.executable or "?", "%d.%d.%d" % sys.version_info[:3], "", "", "", "", ""]
    good = False
print("|".join([good and "ok" or "no"] + found))
'
seen=:
for p in "${P:-python3}" python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 \
  /usr/bin/python3 /usr/local/bin/python3 python; do
  q=$(command -v "$p") || { [ "$p" = "$P" ] && printf 'absent %s\n' "$p"; continue; }
  case $seen in *":$q:"*) continue ;; esac
  seen=$seen$q:
  case $q in /*) ;; *) q=$PWD/$q ;; esac
  out=$(cd / && "$q" -S -c "$code" 2>&1) # Python imports first from the folder it is started in
  case $out in
    *'|'*) out=$(printf '%s\n' "$out" | tail -n 1) ;;
    *) out="no start|$(printf '%s\n' "$out" | grep -i error | head -n 1)" ;;
  esac
  printf 'candidate %s|%s\n' "$q" "$out"
  case $out in 'ok|'*) break ;; esac
done
section folders
shell=$(command -v sh)
for d in "$@"; do
  case $d in
    '~') r=$HOME ;;
    '~/'*) r=$HOME/${d#??} ;;
    *) r=$d ;;
  esac
  printf 'folder %s\n' "$r"
  if [ -e "$r" ] && [ ! -d "$r" ]; then
    echo 'refused make a file is in the way'
    continue
  fi
  # The nearest folder that exists is tried, so that nothing is left behind.
  a=$r
  while [ ! -d "$a" ]; do
    a=${a%/*}
    [ -n "$a" ] || a=/
  done
  df -Pk "$a" | tail -n 1 | sed 's/^/df /'
  t=$a/.probe.$N
  if m=$(mkdir "$t" 2>&1); then
    if m=$({ printf '#!%s\nexit 0\n' "${shell:-/bin/sh}" >"$t/run"; } 2>&1) && [ -s "$t/run" ]; then
      echo writable
      chmod 700 "$t/run"
      if m=$("$t/run" 2>&1); then echo executable; else
        printf 'refused run %s\n' "$m" | tr '\n' ' '
        echo
      fi
    else
      printf 'refused write %s\n' "$m" | tr '\n' ' '
      echo
    fi
  else
    printf 'refused make %s\n' "$m" | tr '\n' ' '
    echo
  fi
  rm -rf "$t"
done
section clock_end
date +%s
section end
