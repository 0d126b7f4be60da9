#!/usr/bin/env bash
# Installs what the sandbox cluster runs on (Debian, Ubuntu), where this user may. Starts no service, now or
# at the next boot, and touches no machine that belongs to a cluster already.
set -euo pipefail
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

packages=(slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2)
programs=(slurmctld slurmd sbatch slurmdbd munged mariadbd ip)
services=(slurmctld slurmd slurmdbd munge mariadb)

later() {
  echo "Slurm is not installed: $1. Its tests will be skipped (docs/install.md)." >&2
  exit 0
}

missing=0
for program in "${programs[@]}"; do command -v "$program" > /dev/null || missing=1; done
((missing)) || exit 0

for conf in "${SLURM_CONF:-}" /etc/slurm/slurm.conf /etc/slurm-llnl/slurm.conf; do
  [[ -n $conf && -e $conf ]] && later "this machine belongs to a cluster ($conf)"
done
command -v apt-get > /dev/null || later "this is neither Debian nor Ubuntu"
sudo=()
if ((EUID)); then
  sudo -n true 2> /dev/null || later "that takes root"
  sudo=(sudo -n)
fi

echo "Installing ${packages[*]} ..."
new=()
for service in "${services[@]}"; do
  systemctl cat "$service" &> /dev/null || new+=("$service")
done
policy=/usr/sbin/policy-rc.d # its exit code 101 keeps packages from starting their services
if [[ ! -e $policy ]]; then
  trap '"${sudo[@]}" rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" > /dev/null
  "${sudo[@]}" chmod +x "$policy"
fi
apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120)
"${apt[@]}" update || echo "apt-get update failed; trying with the package lists as they are" >&2
"${apt[@]}" install -y --no-install-recommends "${packages[@]}" > /dev/null || later "apt-get failed"
((${#new[@]})) && "${sudo[@]}" systemctl disable -q "${new[@]}" &> /dev/null || true
