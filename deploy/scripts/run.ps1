<#
.SYNOPSIS
Serves from a container, with Docker or Podman.
.DESCRIPTION
  deploy\scripts\run.ps1                         the small default model on the CPU, at http://127.0.0.1:8000
  deploy\scripts\run.ps1 cuda --model ORG/NAME   on an NVIDIA GPU; what follows the target goes to levserve

The image levserve:TARGET is built if it is missing. Variables:
  PORT, ADDRESS     where to listen: 8000 and 127.0.0.1
  MODELS            a folder that the container sees as /models, read-only
  IMAGE, ENGINE     the image to run, and docker or podman
LEVSERVE_* and HF_TOKEN are handed on, and so is a file .env in the current folder.
#>
$ErrorActionPreference = 'Stop'

$targets = 'cpu', 'cpu-model', 'cuda', 'cuda12', 'tpu'
$flags = @($args)
$target = 'cpu'
if ($flags.Count -gt 0 -and -not "$($flags[0])".StartsWith('-')) {
    $target = "$($flags[0])"
    $flags = @($flags | Select-Object -Skip 1)
}
if ($targets -notcontains $target) {
    [Console]::Error.WriteLine("run.ps1: unknown target '$target'; the targets are cpu, cpu-model, cuda, cuda12 and tpu")
    exit 2
}
$image = if ($env:IMAGE) { $env:IMAGE } else { "levserve:$target" }
$root = Split-Path -Parent (Split-Path -Parent $PSScriptRoot)

$engine = $env:ENGINE
foreach ($name in 'docker', 'podman') {
    if (-not $engine -and (Get-Command $name -ErrorAction SilentlyContinue)) { $engine = $name }
}
if (-not $engine) {
    [Console]::Error.WriteLine('run.ps1: neither docker nor podman is installed')
    exit 1
}

$ErrorActionPreference = 'Continue'  # Windows PowerShell takes a program's messages on stderr for errors
& $engine image inspect $image *> $null
if ($LASTEXITCODE -ne 0) {
    $build = @('build', '-f', (Join-Path $root 'deploy/docker/Dockerfile'), '--target', $target, '-t', $image)
    if ($engine -ne 'docker') { $build += '--format', 'docker' }  # OCI's own format has no health check
    & $engine @build $root
    if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }
}

$port = $env:PORT
$options = @()
if (Test-Path .env) {
    $options += '--env-file', '.env'
    $line = Select-String -Path .env -Pattern '^PORT=(.*)$' | Select-Object -First 1
    if (-not $port -and $line) { $port = $line.Matches[0].Groups[1].Value.Trim() }
}
if (-not $port) { $port = '8000' }
$address = if ($env:ADDRESS) { $env:ADDRESS } else { '127.0.0.1' }
$options += '--rm', '--read-only', '--tmpfs', '/tmp', '--cap-drop', 'ALL', '--security-opt', 'no-new-privileges'
$options += '--stop-timeout', '50', '--publish', "${address}:${port}:8000"
$options += '--volume', 'levserve-cache:/var/cache/levserve'
if (-not [Console]::IsInputRedirected) { $options += '--interactive', '--tty' }
if ($env:MODELS) { $options += '--volume', "$((Resolve-Path $env:MODELS).Path):/models:ro" }
foreach ($variable in (Get-ChildItem env:).Name) {
    if ($variable -like 'LEVSERVE_*' -or $variable -eq 'HF_TOKEN') { $options += '--env', $variable }
}
$options += '--env', 'LEVSERVE_HOST=0.0.0.0', '--env', 'LEVSERVE_PORT=8000'  # of the container, whatever is published
if ($target -like 'cuda*' -and $engine -eq 'docker') { $options += '--gpus', 'all' }
elseif ($target -like 'cuda*') { $options += '--device', 'nvidia.com/gpu=all' }
elseif ($target -eq 'tpu') { $options += '--privileged' }  # which device files a TPU has depends on its generation

& $engine run @options $image @flags
exit $LASTEXITCODE
