#!/bin/bash
# Build a real kube-apiserver, 1.20.2, from Debian bookworm's source package into the folder given: ten minutes, 2 GB of scratch.
#
#     tests/apiserver/build.sh build/apiserver
#
# Needs Debian 12 with golang-go (1.19), dpkg-dev and golang-github-modern-go-reflect2-dev; no other registry is asked than apt's own.
set -euo pipefail

out=$(mkdir -p "$1" && cd "$1" && pwd)
[ ! -x "$out/kube-apiserver" ] || exit 0
work=$out/work
rm -rf "$work"
mkdir -p "$work/lists/partial" "$work/source"

# apt with the machine's own sources, of which the source packages too
sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources > "$work/debian.sources"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/debian.sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists" -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$work/source" && "${apt[@]}" source --download-only kubernetes=1.20.5+really1.20.2-1.1+deb12u1)

export GOPATH=$work/go GOCACHE=$work/cache GO111MODULE=off CGO_ENABLED=0 GOFLAGS=-p=2
tree=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$(dirname "$tree")"
dpkg-source --no-check -x "$work"/source/*.dsc "$tree"

# the vendored reflect2 1.0.1 is not for Go 1.18 and later
rm -rf "$tree/vendor/github.com/modern-go/reflect2"
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 "$tree/vendor/github.com/modern-go/reflect2"

# the one generated file that is not in the source
cd "$tree"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
dirs=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg staging/src/k8s.io \
  | xargs -n1 dirname | sort -u | grep -v -e /testdata -e /test/ -e /examples -e sample-apiserver -e code-generator \
  | sed -e 's|^staging/src/|k8s.io/kubernetes/vendor/|' -e 's|^pkg/|k8s.io/kubernetes/pkg/|' | paste -sd,)
"$work/openapi-gen" -i "$dirs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null

go build -ldflags '-s -w' -o "$work/kube-apiserver" ./cmd/kube-apiserver
mv "$work/kube-apiserver" "$out/kube-apiserver"
chmod -R u+w "$work"
rm -rf "$work"
