#!/usr/bin/env bash
# A SLURM of one node on this machine, on loopback, for tests. All its files are in one directory.
#   start.sh install         Debian's packages, where they are missing (as root)
#   start.sh start DIR       start it; prints the line that lets SLURM's commands find it
#   start.sh stop DIR        stop it: jobs, daemons
set -euo pipefail
PATH=$PATH:/usr/sbin  # where Debian puts daemons

install() {
  if type -P slurmctld && type -P slurmd && type -P munged; then return; fi >/dev/null
  # exit status 101: no daemon is started by its package
  local policy=/usr/sbin/policy-rc.d mine=
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    mine=1
  fi
  export DEBIAN_FRONTEND=noninteractive
  local packages="slurm-wlm munge"
  # shellcheck disable=SC2086
  apt-get install -qq -y --no-install-recommends $packages >/dev/null 2>&1 \
    || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $packages >/dev/null; } \
    || { [ -z "$mine" ] || rm "$policy"; return 1; }
  [ -z "$mine" ] || rm "$policy"
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

configure() {
  local name cores memory
  name=$(hostname -s)
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # which `nproc` would take for the cores
  memory=$(awk '/MemTotal/ { print int($2 / 1024 * 0.8) }' /proc/meminfo)
  mkdir -p "$dir"/{state,spool,log}
  chmod 755 "$dir"
  cat >"$dir/slurm.conf" <<CONF
ClusterName=featcache
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=100000
KillWait=5
MinJobAge=10
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
NodeName=$name NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$memory State=UNKNOWN
PartitionName=test Nodes=$name Default=YES MaxTime=01:00:00 State=UP OverSubscribe=FORCE:4
CONF
}

running() {  # PIDFILE
  [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null
}

start() {
  export SLURM_CONF=$dir/slurm.conf
  [ -e "$SLURM_CONF" ] || configure
  if ! running "$dir/munged.pid"; then
    [ -e "$dir/munge.key" ] || (umask 077; dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 status=none)
    # --force: the directory is not one of the system's
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
      --seed-file="$dir/munged.seed" --log-file="$dir/log/munged.log" 2>/dev/null
  fi
  running "$dir/slurmctld.pid" || slurmctld -c
  running "$dir/slurmd.pid" || slurmd
  for _ in $(seq 100); do
    if sinfo -h -o %t 2>/dev/null | grep -qx -e idle -e mix -e alloc; then
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.2
  done
  sinfo -R >&2 || true
  tail -n 20 "$dir"/log/*.log >&2
  return 1
}

stop() {
  export SLURM_CONF=$dir/slurm.conf
  if running "$dir/slurmctld.pid"; then
    scancel --signal=KILL --me || true
    for _ in $(seq 50); do
      [ -n "$(squeue -h 2>/dev/null)" ] || break
      sleep 0.2
    done
  fi
  local pid pids=()
  for daemon in slurmd slurmctld munged; do
    running "$dir/$daemon.pid" || continue
    pids+=("$(cat "$dir/$daemon.pid")")
    kill "${pids[-1]}"
  done
  for pid in "${pids[@]}"; do
    for _ in $(seq 50); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.2
    done
    kill -9 "$pid" 2>/dev/null || true
  done
}

word=${1:-}
dir=${2:-}
case "$word" in
  install) install ;;
  start | stop) [ -n "$dir" ] || { echo "which directory? start.sh $word DIR" >&2; exit 2; }; "$word" ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
